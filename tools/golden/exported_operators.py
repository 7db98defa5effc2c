#!/usr/bin/env python3
"""Writes src/tables/exported_operators.inc: the operators that an exported graph may call.

    exported_operators.py            the core ATen operators of the installed PyTorch, and MORE
    exported_operators.py --check    fails if a model of exported_models.py calls another

A graph is untrusted input. Operators that compute a value from values are allowed. Left out are
those that read files, replace or resize storage, make views with strides of their own, or
skip torch's checks. So are kernels that trust their caller (UNSAFE); operators.cpp checks the arguments of
_weight_norm and lstm, which have no other form.
"""

import argparse
import pathlib
import re

import torch

TARGET = pathlib.Path(__file__).parents[2] / "src/tables/exported_operators.inc"
# What training graphs have beside core ATen: torch.export decomposes nothing.
MORE = """
    absolute multiply divide subtract negative true_divide greater less greater_equal less_equal not_equal add_.Scalar add_.Tensor adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d addcmul addmv
    alpha_dropout argsort atleast_1d atleast_2d avg_pool1d.default baddbmm batch_norm bilinear bincount
    binary_cross_entropy_with_logits block_diag broadcast_tensors broadcast_to chunk clamp_.default
    clamp_min.default clamp_max.default concat concatenate contiguous conv1d.default conv1d.padding conv2d.default conv2d.padding
    conv3d.default conv_transpose1d conv_transpose2d.input cosine_similarity cross_entropy_loss
    cumprod detach detach_ diff div_.Scalar div_.Tensor dot dropout dropout_ einsum
    expand_as feature_dropout fill_.Scalar fill_.Tensor flatten.using_ints floor_divide.default
    floor_divide.Scalar gather group_norm hardshrink hinge_embedding_loss huber_loss im2col col2im index_add index_copy index_fill.int_Scalar
    index_fill.int_Tensor index_put_ index_select instance_norm
    is_nonzero isclose kl_div l1_loss layer_norm lerp.Scalar lerp.Tensor lift_fresh_copy linalg_norm linalg_vector_norm linear log_sigmoid
    log_softmax.int logaddexp logical_not_ logsumexp lstm.input gru.input masked_fill.Scalar masked_fill.Tensor
    masked_fill_.Scalar masked_fill_.Tensor masked_scatter masked_select matmul max_pool1d max_pool2d max_pool3d mish movedim.int movedim.intlist
    mse_loss mul_.Scalar mul_.Tensor multi_head_attention_forward narrow.default nan_to_num new_empty new_full new_ones new_zeros
    nll_loss nll_loss_nd norm.ScalarOpt_dim numpy_T one_hot ones_like outer pad pairwise_distance pixel_shuffle pixel_unshuffle
    prelu quantile.scalar relu_ relu6 repeat_interleave.self_Tensor repeat_interleave.self_int repeat_interleave.Tensor
    reshape reshape_as rms_norm roll rot90 round.decimals rsub.Scalar rsub.Tensor scaled_dot_product_attention
    scatter_.src scatter_.value scatter_add_ searchsorted.Tensor bucketize.Tensor selu sigmoid_ silu silu_ slice.Tensor smooth_l1_loss softmax.int softplus special_erf square
    squeeze.default squeeze.dim squeeze.dims stack std.default std.dim std.correction sub_.Scalar sub_.Tensor sum_to_size swapaxes swapdims t
    take_along_dim tensor_split.sections tensor_split.indices tensordot tile to.dtype to.device to.dtype_layout to.other transpose.int tril triu
    tril_ triu_ trunc type_as unbind.int unflatten.int unfold unsafe_chunk unsafe_split.Tensor unsafe_split_with_sizes upsample_bicubic2d.vec upsample_bilinear2d.vec
    upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec var.default var_mean.correction vdot view view_as vstack hstack where.self
    where.ScalarSelf where.ScalarOther where.Scalar zero_ zeros zeros_like ones empty_like bernoulli.default bernoulli.p arange.default arange.start arange.start_step
    eye eye.m linspace meshgrid meshgrid.indexing tril_indices triu_indices full.default full_like scalar_tensor
    _log_softmax _softmax _weight_norm_interface _weight_norm ceil floor exp expm1 log log1p log2 sin cos tanh erf gelu gelu_ elu leaky_relu hardtanh hardswish hardsigmoid glu
    max.default max.dim max.other min.default min.dim min.other maximum minimum topk sort sort.stable cumsum histc bitwise_and.Tensor bitwise_or.Tensor
    bitwise_xor.Tensor bitwise_not bitwise_and.Scalar logical_and logical_or logical_not logical_xor eq.Scalar eq.Tensor ne.Scalar ne.Tensor
    ge.Scalar ge.Tensor gt.Scalar gt.Tensor le.Scalar le.Tensor lt.Scalar lt.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
    all any all.dim any.dim split.Tensor split_with_sizes split.sizes
    add.Scalar sub.Scalar mul.Scalar div.Scalar div.Scalar_mode pow.Tensor_Tensor
    grid_sampler affine_grid_generator cdist fft_fft fft_rfft fft_irfft stft hann_window view_as_real view_as_complex
    polar real imag complex
    mm bmm addmm clone copy copy_ alias expand permute unsqueeze select.int flip constant_pad_nd reflection_pad1d reflection_pad2d
    native_layer_norm native_group_norm native_batch_norm embedding isnan isinf isfinite masked_select
""".split()
FORBIDDEN = re.compile(
    r"(^|_)(from_file|set|resize|resize_as|as_strided|as_strided_scatter|unsafe|sparse|quantized?|fbgemm|mkldnn|cudnn|"
    r"coalesced|storage|pin_memory|record_stream|backward|sym|assert|print|save|load)(_|\.|$)"
)

# They read outside of tensors or divide by zero where sizes do not fit.
UNSAFE = re.compile(
    r"embedding_bag|empty_strided|_fft_[cr]2[cr]|_?native_batch_norm(_legit.*)?|_pdist_forward|_cdist_forward|_embedding_bag"
)


def core():
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space != "aten":
            continue
        packet = getattr(torch.ops.aten, base, None)
        operator = getattr(packet, overload or "default", None) if packet else None
        if operator and torch.Tag.core in operator.tags:
            yield f"{base}.{overload or 'default'}"


def allowed():
    names = set(core())
    for name in MORE:
        packet = getattr(torch.ops.aten, name.partition(".")[0], None)
        overload = name.partition(".")[2]
        if packet is None:
            continue
        names.update(
            [f"{name.partition('.')[0]}.{o}" for o in packet.overloads() if not overload or o == overload]
        )
    out = re.compile(r"[._]out$|names|dimname", re.I)
    return sorted(f"aten.{n}" for n in names if not FORBIDDEN.search(n.partition(".")[0]) and not UNSAFE.fullmatch(n.partition(".")[0]) and not out.search(n))


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines, line = [], ""
    for name in allowed():
        item = f'"{name}", '
        if len(line) + len(item) > 100:
            lines.append(line.rstrip())
            line = ""
        line += item
    lines.append(line.rstrip())
    head = f"// tools/golden/exported_operators.py wrote this from PyTorch {torch.__version__.partition('+')[0]}.\n"
    TARGET.write_text(head + "\n".join(lines) + "\n")
    print(f"{len(allowed())} operators")


if __name__ == "__main__":
    main()
