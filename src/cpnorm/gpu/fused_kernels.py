"""Triton kernels of fused blocks: from the terms of one canonical layer to those of the next, storing no channels.

``fused_launch.py`` calls them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A program computes a tile of pixels. It reads the terms around them and weighs them by the taps, once. Then, chunk by
# chunk of output channels, it maps the tile to these channels and, while they are in registers, to the terms of the
# next layer. Before a pooling it holds four tiles, one for each corner of the pooling's windows.
#
# Sizes that select the compiled code are constants; tuples are in the order (rows, columns):
#
#   kernel, stride, padding, dilation   those of the convolution
#   terms, width                        the numbers in a patch or the rank, without and with padding by zeros
#   channels, following                 O, and the width of the next layer's terms
#   *_block                             how many are held at once, powers of 2


@triton.jit
def _weighed(  # type: ignore[no-untyped-def]
    tile, z, taps, term, u: tl.constexpr, v: tl.constexpr, kernel: tl.constexpr, dilation: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    # Add the pixels u rows below and v columns right of those of the first tap to the tile, if a tap lies there.
    meets: tl.constexpr = u >= 0 and v >= 0 and u % dilation[0] == 0 and v % dilation[1] == 0
    if meets and u // dilation[0] < kernel[0] and v // dilation[1] < kernel[1]:
        tap = (u // dilation[0]) * kernel[1] + v // dilation[1]
        tile += z * tl.load(taps + tap * width + term, mask=term < width, other=0.0).to(tl.float32)[None, :]
    return tile


@triton.jit
def _terms(  # type: ignore[no-untyped-def]
    x, taps, image, row, column, there, H, W, kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    dilation: tl.constexpr, pool: tl.constexpr, width: tl.constexpr, pixel_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # Return four tiles, which are the same without a pooling. Their windows overlap: each pixel is read once, for all.
    term = tl.arange(0, block)
    tile = tl.zeros([pixel_block, block], tl.float32)
    right, below, across = tile, tile, tile
    s0: tl.constexpr = stride[0]
    s1: tl.constexpr = stride[1]
    step: tl.constexpr = 2 if pool else 1
    first, start = row * (step * s0) - padding[0], column * (step * s1) - padding[1]
    base = x + image.to(tl.int64) * (H * W * width)
    for u in tl.static_range((step - 1) * s0 + (kernel[0] - 1) * dilation[0] + 1):
        for v in tl.static_range((step - 1) * s1 + (kernel[1] - 1) * dilation[1] + 1):
            h, w = first + u, start + v
            inside = there & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            place = (base + (h * W + w) * width)[:, None] + term[None, :]
            z = tl.load(place, mask=inside[:, None] & (term < width)[None, :], other=0.0).to(tl.float32)
            tile = _weighed(tile, z, taps, term, u, v, kernel, dilation, width)
            if pool:
                right = _weighed(right, z, taps, term, u, v - s1, kernel, dilation, width)
                below = _weighed(below, z, taps, term, u - s0, v, kernel, dilation, width)
                across = _weighed(across, z, taps, term, u - s0, v - s1, kernel, dilation, width)
    kind: tl.constexpr = x.dtype.element_ty
    return tile.to(kind), right.to(kind), below.to(kind), across.to(kind)


@triton.jit
def _patch(  # type: ignore[no-untyped-def]
    x, strides, image, row, column, there, H, W, kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr,
    dilation: tl.constexpr, terms: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # Return the pixels under the kernel, in the order of the dense weight: channel, row, column.
    j = tl.arange(0, block)
    h = (row * stride[0] - padding[0])[:, None] + ((j // kernel[1]) % kernel[0] * dilation[0])[None, :]
    w = (column * stride[1] - padding[1])[:, None] + (j % kernel[1] * dilation[1])[None, :]
    inside = there[:, None] & (j < terms)[None, :] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    channel = j // (kernel[0] * kernel[1])
    place = (image.to(tl.int64) * strides[0])[:, None] + (channel * strides[1])[None, :] + h * strides[2]
    return tl.load(x + place + w * strides[3], mask=inside, other=0.0)


@triton.jit
def block_kernel(  # type: ignore[no-untyped-def]
    x, taps, out, bias, into, residual, y, count, H, W, H2, W2, strides,
    kernel: tl.constexpr, stride: tl.constexpr, padding: tl.constexpr, dilation: tl.constexpr, patches: tl.constexpr,
    relu: tl.constexpr, pool: tl.constexpr, terms: tl.constexpr, width: tl.constexpr, channels: tl.constexpr,
    following: tl.constexpr, pixel_block: tl.constexpr, term_block: tl.constexpr, channel_block: tl.constexpr,
    channels_each: tl.constexpr, following_block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Map terms, rows or patches to channels, then max pooling, bias, residual, ReLU, and to channels or terms."""
    # Programs that share a tile are neighbours, so that one finds in the cache what the other has read.
    shares: tl.constexpr = (channels + channels_each - 1) // channels_each
    pixel = tl.program_id(0) // shares * pixel_block + tl.arange(0, pixel_block)
    first = tl.program_id(0) % shares * channels_each
    there = pixel < count
    term = tl.arange(0, term_block)
    kind: tl.constexpr = x.dtype.element_ty

    image = pixel // (H2 * W2)
    row, column = pixel // W2 % H2, pixel % W2
    if patches:
        step: tl.constexpr = 2 if pool else 1
        r, c = row * step, column * step
        a0 = _patch(x, strides, image, r, c, there, H, W, kernel, stride, padding, dilation, terms, term_block)
        if pool:
            a1 = _patch(x, strides, image, r, c + 1, there, H, W, kernel, stride, padding, dilation, terms, term_block)
            a2 = _patch(x, strides, image, r + 1, c, there, H, W, kernel, stride, padding, dilation, terms, term_block)
            a3 = _patch(
                x, strides, image, r + 1, c + 1, there, H, W, kernel, stride, padding, dilation, terms, term_block
            )
    elif taps is not None:
        a0, a1, a2, a3 = _terms(
            x, taps, image, row, column, there, H, W, kernel, stride, padding, dilation, pool, width, pixel_block,
            term_block,
        )  # fmt: skip
    else:
        rows = x + pixel.to(tl.int64)[:, None] * width + term[None, :]
        a0 = tl.load(rows, mask=there[:, None] & (term < width)[None, :], other=0.0)

    if into is not None:
        then = tl.arange(0, following_block)
        total = tl.zeros([pixel_block, following_block], tl.float32)
    for start in range(first, first + channels_each, channel_block):
        channel = start + tl.arange(0, channel_block)
        known = channel < channels
        weight_place = out + term[:, None] * channels + channel[None, :]
        weight = tl.load(weight_place, mask=(term < width)[:, None] & known[None, :], other=0.0)
        z = tl.dot(a0, weight, input_precision=precision)
        if pool:
            z = tl.maximum(z, tl.dot(a1, weight, input_precision=precision), tl.PropagateNan.ALL)
            z = tl.maximum(z, tl.dot(a2, weight, input_precision=precision), tl.PropagateNan.ALL)
            z = tl.maximum(z, tl.dot(a3, weight, input_precision=precision), tl.PropagateNan.ALL)
        if bias is not None:
            z += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
        if residual is not None:
            other_place = residual + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
            z += tl.load(other_place, mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)
        if relu:
            z = tl.maximum(z, 0.0, tl.PropagateNan.ALL)
        if into is None:
            place = y + pixel.to(tl.int64)[:, None] * channels + channel[None, :]
            tl.store(place, z.to(kind), mask=there[:, None] & known[None, :])
        else:
            into_place = into + channel[:, None] * following + then[None, :]
            next_weight = tl.load(into_place, mask=known[:, None] & (then < following)[None, :], other=0.0)
            total = tl.dot(z.to(kind), next_weight, total, input_precision=precision)
    if into is not None:
        place = y + pixel.to(tl.int64)[:, None] * following + then[None, :]
        tl.store(place, total.to(kind), mask=there[:, None] & (then < following)[None, :])


# --- epilogues of other layers ----------------------------------------------------------------------------------------


@triton.jit
def epilogue_kernel(  # type: ignore[no-untyped-def]
    x, bias, residual, y, count, H2, W2, strides,
    channels: tl.constexpr, channels_last: tl.constexpr, relu: tl.constexpr, pool: tl.constexpr,
    outer_block: tl.constexpr, inner_block: tl.constexpr,
):  # fmt: skip
    """Apply max pooling, bias, residual and ReLU; y and the residual lie as x does, whose last dimension is inner."""
    inner_size = channels if channels_last else W2
    blocks = tl.cdiv(inner_size, inner_block)
    outer = tl.program_id(0) // blocks * outer_block + tl.arange(0, outer_block)
    inner = tl.program_id(0) % blocks * inner_block + tl.arange(0, inner_block)
    there = (outer < count)[:, None] & (inner < inner_size)[None, :]
    step: tl.constexpr = 2 if pool else 1
    if channels_last:
        image, row, column = outer // (H2 * W2), outer // W2 % H2, outer % W2
        place = image.to(tl.int64) * strides[0] + row * step * strides[2] + column * step * strides[3]
        place = place[:, None] + (inner * strides[1])[None, :]
    else:
        image, channel, row = outer // (H2 * channels), outer // H2 % channels, outer % H2
        place = image.to(tl.int64) * strides[0] + channel * strides[1] + row * step * strides[2]
        place = place[:, None] + (inner * step * strides[3])[None, :]
    z = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if pool:
        right = tl.load(x + place + strides[3], mask=there, other=0.0).to(tl.float32)
        below = tl.load(x + place + strides[2], mask=there, other=0.0).to(tl.float32)
        across = tl.load(x + place + strides[2] + strides[3], mask=there, other=0.0).to(tl.float32)
        z = tl.maximum(tl.maximum(z, right, tl.PropagateNan.ALL), below, tl.PropagateNan.ALL)
        z = tl.maximum(z, across, tl.PropagateNan.ALL)
    if bias is not None:
        if channels_last:
            z += tl.load(bias + inner, mask=inner < channels, other=0.0).to(tl.float32)[None, :]
        else:
            z += tl.load(bias + channel, mask=outer < count, other=0.0).to(tl.float32)[:, None]
    written = outer.to(tl.int64)[:, None] * inner_size + inner[None, :]
    if residual is not None:
        z += tl.load(residual + written, mask=there, other=0.0).to(tl.float32)
    if relu:
        z = tl.maximum(z, 0.0, tl.PropagateNan.ALL)
    tl.store(y + written, z.to(x.dtype.element_ty), mask=there)
