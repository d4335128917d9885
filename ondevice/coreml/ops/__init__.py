"""The emulator's ops by MIL type: `RULES` for those that run, `CONSTEXPR` for packed weights.

coremltools 9.0 brings its own operator tests. Those of ML programs were run with the emulator as
Core ML (`tests/test_coremltools_ops.py`, slow): of 1,832 cases that predict with ops that are known
here 1,828 passed. 2,174 use an op that is not, and are refused by name; 143 more of their kind
(sparse weights under a palette) were not run; 775 need torch, which was absent, before they get to
a prediction. The 4 failures want a scatter that may not check its indices to go wrong outside its
data; here it wraps around or raises. By op, the cases that passed (of how many, where some failed):

abs 1, acos 1, add 205, argsort 1, asin 1, atan 1, atanh 1, avg_pool 3, band_part 13, batch_norm 6,
cast 1390 of 1394, clamped_relu 15, clip 1, concat 23, constexpr_affine_dequantize 32,
constexpr_blockwise_shift_scale 64, constexpr_cast 6, constexpr_lut_to_dense 395,
constexpr_sparse_to_dense 14, conv 1, cos 1, cosh 1, crop 12, cumsum 1, depth_to_space 1, einsum 5,
elu 3, equal 1, erf 1, exp 1, exp2 1, expand_dims 46, fill_like 1, flatten2d 36, floor 1, floor_div
1, gather 90, gather_along_axis 357, gather_nd 45, gelu 7, greater 1, greater_equal 43, identity
364, instance_norm 12, inverse 13, l2_norm 37, l2_pool 2, layer_norm 22, leaky_relu 5, less 3,
less_equal 1, linear 11, linear_activation 6, local_response_norm 1, log 13, matmul 21, max_pool 3,
maximum 1, minimum 1, mod 1, mul 1, not_equal 1, pad 1, pixel_shuffle 1, pixel_unshuffle 1, pow 1,
prelu 12, range_1d 1, read_state 6, real_div 1, reduce_argmax 4, reduce_argmin 4, reduce_l1_norm 1,
reduce_l2_norm 1, reduce_log_sum 1, reduce_log_sum_exp 1, reduce_max 4, reduce_mean 4, reduce_min 1,
reduce_prod 1, reduce_sum 1, reduce_sum_square 1, relu 2, relu6 1, reshape 23, reverse 8, round 1,
rsqrt 13, scaled_tanh 15, scatter 3 of 7, scatter_along_axis 43, scatter_nd 3, select 45, sigmoid 1,
sigmoid_hard 15, sign 1, silu 1, sin 1, sinh 1, slice_by_index 1, slice_by_size 24, slice_update 19,
sliding_windows 88, softmax 1, softplus 1, softplus_parametric 15, softsign 1, space_to_depth 1,
split 1, sqrt 3, square 3, squeeze 8, stack 1, sub 1, tan 1, tanh 1, threshold 1, thresholded_relu
9, tile 1, topk 29, transpose 8, upsample_nearest_neighbor 2, write_state 2.

In none of those cases, and tested by the project's own tests: ceil, conv_transpose, dequantize,
fill, logical_and, logical_not, logical_or, logical_xor, one_hot, quantize,
scaled_dot_product_attention, shape.
"""

from ondevice.coreml.ops import (  # noqa: F401  fill RULES
    channelwise,
    elementwise,
    linear,
    reduction,
    scatter,
    shape,
    state,
    windows,
)
from ondevice.coreml.ops.base import RULES
from ondevice.coreml.ops.constexpr import CONSTEXPR

__all__ = ["CONSTEXPR", "RULES"]
