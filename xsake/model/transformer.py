"""Transformer: one decoder for GPT-2 and the Llama family; the attention function is an argument.

    tokens [B, T] ─ embed ─ x ─┬─ norm ─ q, k, v ─ (q/k norm) ─ (rope) ─ attend ─ out ─ + ─┐
                               └────────────────────────────────────────────────────────── + ─ x
                               ┌─ norm ─ up (· gate) ─ down ─┐
                             x ┴──────────────────────────── + ─ x    `layers` times, ─ norm ─ head

The parameters of all layers are stacked on a leading axis, so that a scan over layers is natural
and a checkpoint is a handful of arrays. `model.parameters()` names them:

    embed.tokens            [vocab, embed]
    embed.positions         [context, embed]                      positions = "learned"
    layers.attention_norm.scale   [layers, embed]                 and .bias with norm = "layer"
    layers.query.kernel     [layers, embed, heads, head_size]     .bias [layers, heads, head_size]
    layers.key.kernel       [layers, embed, kv_heads, head_size]      with qkv_bias
    layers.value.kernel     [layers, embed, kv_heads, head_size]
    layers.query_norm.scale [layers, head_size]                   qk_norm
    layers.key_norm.scale   [layers, head_size]                   qk_norm
    layers.out.kernel       [layers, heads, head_size, embed]     .bias [layers, embed]: out_bias
    layers.sinks            [layers, heads]                       sinks
    layers.attention_post_norm.scale [layers, embed]              post_norms; mlp_post_norm too
    layers.mlp_norm.scale   [layers, embed]                       and .bias with norm = "layer"
    layers.gate.kernel      [layers, embed, mlp]                  gated; .bias with mlp_bias
    layers.up.kernel        [layers, embed, mlp]                  .bias [layers, mlp] with mlp_bias
    layers.down.kernel      [layers, mlp, embed]                  .bias [layers, embed]
    layers.sparse.gates.kernel       [layers, embed, branches, heads]       sparse attention with
                                                                            more than one branch
    layers.sparse.pool_key.weights   [layers, block, kv_heads]              compression = "weights";
    layers.sparse.pool_key.positions [layers, block, kv_heads, head_size]   pool_value likewise
    layers.sparse.pool_key.positions [layers, block, head_size]             compression = "mlp",
    layers.sparse.pool_key.hidden.kernel [layers, block, head_size, pool_width]     and .bias;
    layers.sparse.pool_key.out.kernel    [layers, pool_width, head_size]    pool_value likewise
    layers.sparse.index_query.kernel [layers, embed, kv_heads, index_size]  attention = "msa"
    layers.sparse.index_key.kernel   [layers, embed, index_heads, index_size]
    norm.scale              [embed]                               and .bias with norm = "layer"
    head.kernel             [embed, vocab]                        unless tied

A kernel maps its first axes to its last: y = x · kernel + bias. The axis names above are each
parameter's `out_sharding`, which `nnx.get_partition_spec` reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh
from jaxtyping import Float

from xsake.hads.chunks import PLAIN, Softmax
from xsake.model import rope
from xsake.model.attend import Attend, ModelMask, Order, by_mask, softmax_of
from xsake.model.config import Config
from xsake.model.modules import Axes, Linear, Norm, constant, normal
from xsake.model.positions import positions_in_order
from xsake.model.sparse.attend import by_blocks, with_index_loss
from xsake.model.sparse.module import SparseAttention, SparseInputs
from xsake.parallel import sharding

HIDDEN = ("batch", "sequence", "width")  # the axes of hidden states

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Observation(NamedTuple):
    """Inputs and output of one layer's attention."""

    q: Array  # [B, T, N, H], normed and rotated
    k: Array  # [B, T, K, H]
    v: Array  # [B, T, K, H]
    out: Array  # [B, T, N, H], what enters the output projection
    kernel: Array  # [N, H, width], the output projection
    softmax: Softmax = PLAIN  # soft cap, window and sinks


class SparseObservation(NamedTuple):
    """The same of a layer with sparse attention, and what that takes beside q, k and v."""

    q: Array
    k: Array
    v: Array
    out: Array
    kernel: Array
    inputs: SparseInputs


class Transformer(nnx.Module):
    """A decoder: float32 parameters, computed in `dtype`, float32 logits.

    Args:
      config: its shape.
      rngs: for the initial weights: `nnx.Rngs(0)`.
      dtype: compute dtype; parameters are cast to it where they are used.
      scan: use lax.scan over layers, which compiles faster, or unroll them.
      remat: keep only each layer's input for the backward pass and recompute the rest.
      implementation: of `xsake.dot_product_attention`; default the fastest that can run.
      mesh: the devices that a pass is split over, for parameters that lie as
        `parallel.sharding.of_parameters` says; its axes divide the batch and the config's sizes.
      order: of the tokens, where mesh.context splits them. "contiguous"; "zigzag": the caller
        passes tokens and segment ids in the order of `parallel.token_order`, and gets hidden states
        in that order; "balanced": contiguous, and attention moves row blocks between devices so
        that all have equal work.

    >>> from flax import nnx
    >>> from xsake.model import PRESETS, Transformer
    >>> model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 256)
    """

    def __init__(
        self,
        config: Config,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        scan: bool = True,
        remat: bool = False,
        implementation: str | None = None,
        mesh: Mesh | None = None,
        order: Order = "contiguous",
    ) -> None:
        self.config, self.mesh, self.order = config, mesh, order
        self.dtype = jnp.dtype(dtype).name
        self.scan, self.remat, self.implementation = scan, remat, implementation
        vocab, embed = {"vocab": config.vocab_size}, {"embed": config.width}
        self.embed = Embedding(config, rngs)
        self.layers: Layer | nnx.List[Layer] = Layer(config, rngs, {"layers": config.layers})
        self.norm = Norm(config.norm, config.norm_epsilon, embed)
        self.head = None if config.tied else Linear(rngs, embed, vocab)

    def __call__(
        self, tokens: Any, *, mask: ModelMask = None, positions: Any = None, segment_ids: Any = None
    ) -> Float[Array, "B T vocab"]:
        """Logits of the next token, float32 [B, T, vocab].

        Args:
          tokens: int [B, T].
          mask: restricts attention, optionally per layer; `attend.by_mask` lists the types. Under
            jit its arrays may be arguments: new values do not recompile.
          positions: int [B, T], for the position embedding only; default 0, 1, 2 …, from 0 again
            where segment_ids change. Masks use the token's index in its row.
          segment_ids: int [B, T] of packed documents, which do not see each other.
        """
        hidden = self.hidden(tokens, mask=mask, positions=positions, segment_ids=segment_ids)
        return self.logits(hidden)

    def hidden(
        self, tokens: Any, *, mask: ModelMask = None, positions: Any = None, segment_ids: Any = None
    ) -> Float[Array, "B T width"]:
        """Final hidden states [B, T, width], for a loss that never holds all logits in memory."""
        attend, positions = self._prepare(tokens, mask, positions, segment_ids)
        return self.run(tokens, positions, attend)[0]

    def hidden_and_index_loss(
        self, tokens: Any, *, positions: Any = None, segment_ids: Any = None
    ) -> tuple[Float[Array, "B T width"], Float[Array, ""]]:
        """`hidden`, and the loss of the indexer of attention = "msa": KL, the mean over layers."""
        if self.config.attention != "msa":
            raise ValueError(
                "hidden_and_index_loss needs attention = 'msa', which has an indexer, but it is "
                f"{self.config.attention!r}; use hidden"
            )
        _, positions = self._prepare(tokens, None, positions, segment_ids)
        attend = with_index_loss(self.config, segment_ids, self.implementation, self.mesh)
        hidden, total = self.run(tokens, positions, attend, jnp.zeros((), jnp.float32))
        return hidden, total / self.config.layers

    def logits(self, hidden: Float[Array, "*lead width"]) -> Float[Array, "*lead vocab"]:
        """hidden [..., width] -> float32 [..., vocab]."""
        kernel = self.head_kernel().astype(hidden.dtype)
        found = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32).astype(jnp.float32)
        cap = self.config.final_soft_cap
        return found if cap is None else cap * jnp.tanh(found / cap)

    def head_kernel(self) -> Float[Array, "width vocab"]:
        """The matrix that maps hidden states to logits, [width, vocab]."""
        return self.embed.tokens[...].T if self.head is None else self.head.kernel[...]

    def observe(
        self,
        tokens: Any,
        fold: Callable[[Any, Any, Any], Any],
        carry: Any,
        *,
        mask: ModelMask = None,
        positions: Any = None,
        segment_ids: Any = None,
    ) -> Any:
        """Folds over the layers' attention: carry = fold(layer, Observation, carry), in order.

        One layer's q, k and v are alive at a time. Under scan `layer` is traced and `carry` keeps
        its shapes: `carry.at[layer].set(…)` collects a figure for each layer. Layers with sparse
        attention give a SparseObservation. On a mesh, every device has one layer's whole arrays.
        """
        attend, positions = self._prepare(tokens, mask, positions, segment_ids)

        def watched(
            layer: Any, q: Array, k: Array, v: Array, carry: Any, *more: Any
        ) -> tuple[Array, Any]:
            out, _ = attend(layer, q, k, v, None, *more)
            kernel = self.layer(layer).out.kernel[...]
            if self.config.is_sparse:
                seen: Any = SparseObservation(q, k, v, out, kernel, *more)
            else:
                seen = Observation(q, k, v, out, kernel, self.softmax(layer))
            return out, fold(layer, sharding.everywhere(seen, self.mesh), carry)

        found = self.run(tokens, positions, watched, carry)[1]
        return sharding.everywhere(found, self.mesh)

    def run(
        self,
        tokens: Any,
        positions: Any,
        attend: Attend,
        state: Any = None,
        *,
        scan: bool | None = None,
        rows: Callable[[Array], Array] | None = None,
    ) -> tuple[Float[Array, "B T width"], Any]:
        """(hidden [B, T, width], state) after all layers; `attend` is each one's attention.

        In a model with sparse attention, `attend` takes the layer's SparseInputs as well. `scan`
        replaces the model's own: False gives `attend` the layers' numbers as ints. `rows` takes
        the rows of [B, T, …] that the last of stacked layers computes; `attend` gets their q only.
        """
        config, scan = self.config, self.scan if scan is None else scan
        x = self.embed(tokens, positions, self.mesh).astype(self.dtype)
        x = sharding.constrained(x, HIDDEN, self.mesh)
        angles = _angles(config, positions)

        def through(number: Any, layer: Any, x: Array, state: Any) -> tuple[Array, Any]:
            x, state = layer(number, x, angles(number), attend, state)
            return sharding.constrained(x, HIDDEN, self.mesh), state

        if rows is not None:
            last = config.layers - 1
            x, state = lax.fori_loop(
                0, last, lambda i, carry: through(i, self.layer(i), *carry), (x, state)
            )
            x, state = self.layer(last)(last, x, angles(last), attend, state, rows)
        elif scan and self.is_stacked:
            step = jax.checkpoint(through) if self.remat else through
            (x, state), _ = lax.scan(
                lambda carry, layer: (step(*layer, *carry), None),
                (x, state),
                (jnp.arange(config.layers), self.layers),
            )
        else:
            for number in range(config.layers):
                step = functools.partial(through, number)
                step = jax.checkpoint(step) if self.remat else step
                x, state = step(self.layer(number), x, state)
        return self.norm(x), state

    def layer(self, number: Any) -> Layer:
        """One layer with its own weights."""
        if isinstance(self.layers, Layer):
            return jax.tree.map(lambda stacked: stacked[number], self.layers)
        return self.layers[number]

    def softmax(self, number: Any) -> Softmax:
        """The soft cap, window and sinks of a layer's attention, for HADS."""
        sinks = self.layer(number).sinks
        return softmax_of(self.config, number, None if sinks is None else sinks[...])

    @property
    def is_stacked(self) -> bool:
        """Whether all layers' weights are stacked in common arrays."""
        return isinstance(self.layers, Layer)

    def unstacked(self) -> Transformer:
        """A copy in `dtype` whose layers have their own arrays, which decodes faster.

        A slice of a stacked array is copied before each product, which costs as much as the product
        itself for a single token. The copy takes longer to compile, and its parameters have other
        names: layers.0.up.kernel, layers.1.up.kernel ….
        """
        graph, state = nnx.split(self)
        narrow = nnx.merge(graph, jax.tree.map(lambda x: x.astype(self.dtype), state))
        layers = [narrow.layer(number) for number in range(self.config.layers)]
        for layer in layers:
            for _, leaf in nnx.to_flat_state(nnx.state(layer)):
                leaf.set_metadata(out_sharding=leaf.out_sharding[1:])  # the axis of layers is gone
        narrow.layers = nnx.List(layers)
        return narrow

    def _prepare(
        self, tokens: Any, mask: ModelMask, positions: Any, segment_ids: Any
    ) -> tuple[Attend, Array]:
        """Checks the inputs; returns the attend function and the positions of a full pass."""
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be int [B, T], got {tokens.dtype} {list(tokens.shape)}")
        B, T = tokens.shape
        for name, x in (("positions", positions), ("segment_ids", segment_ids)):
            if x is not None and jnp.shape(x) != (B, T):
                raise ValueError(f"{name} must be [{B}, {T}] as tokens, got {list(jnp.shape(x))}")
        if positions is None:
            if self.config.positions == "learned" and self.config.context < T:
                raise ValueError(
                    f"{T} tokens are more than the {self.config.context} positions that this model "
                    "learned; shorten the sequence or pass positions"
                )
            positions = positions_in_order(B, T, segment_ids, self.mesh, self.order)
        if self.config.is_sparse:
            if mask is not None:
                raise ValueError(
                    "mask restricts dense attention, but this model has attention = "
                    f"{self.config.attention!r}, which selects its own blocks; leave mask out"
                )
            attend = by_blocks(self.config, segment_ids, self.implementation, self.mesh)
        else:
            how = (self.implementation, self.mesh, self.order)
            attend = by_mask(self.config, mask, B, T, segment_ids, *how)
        return attend, jnp.asarray(positions)

    # ---------------------------------------------------------------------------------- parameters

    def parameters(self) -> dict[str, Array]:
        """Every parameter by its dotted name, as at the top of this module."""
        return {name: leaf[...] for name, leaf in _leaves(nnx.state(self, nnx.Param)).items()}

    def hash(self) -> str:
        """A hash of all parameters, which profiles and plans record; reads every one of them."""
        from xsake.hads.files import hash_of

        parameters = self.parameters()
        return hash_of(jax.device_get(parameters[name]) for name in sorted(parameters))

    @classmethod
    def of(cls, config: Config, parameters: Mapping[str, Any], **options: Any) -> Transformer:
        """A model of existing arrays, without a cast or a copy; names and shapes are checked."""
        blank = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **options))
        graph, state = nnx.split(blank)
        wanted = _leaves(state)
        for name in parameters:
            if name not in wanted:
                raise ValueError(f"parameter {name!r} is not one that this config has")
        for name, leaf in wanted.items():
            if name not in parameters:
                raise ValueError(f"parameter {name!r} of shape {list(leaf.shape)} is missing")
            if tuple(parameters[name].shape) != tuple(leaf.shape):
                raise ValueError(
                    f"parameter {name!r} must have shape {list(leaf.shape)}, "
                    f"got {list(parameters[name].shape)}"
                )
            leaf.set_value(jnp.asarray(parameters[name]))
        return nnx.merge(graph, state)


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its name, nothing allocated.

    >>> from xsake.model import PRESETS
    >>> parameter_shapes(PRESETS["smollm2-135m"])["layers.query.kernel"]
    (30, 576, 9, 64)
    """
    blank = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return {name: tuple(leaf.shape) for name, leaf in _leaves(nnx.state(blank)).items()}


def parameter_axes(config: Config) -> dict[str, tuple[str, ...]]:
    """The logical axes of every parameter by its name, for `parallel.sharding`.

    >>> from xsake.model import PRESETS
    >>> parameter_axes(PRESETS["smollm2-135m"])["layers.query.kernel"]
    ('layers', 'embed', 'heads', 'head_size')
    """
    blank = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return {name: tuple(leaf.out_sharding) for name, leaf in _leaves(nnx.state(blank)).items()}


def _leaves(state: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _angles(config: Config, positions: Any) -> Callable[[Any], Any]:
    """A layer's number -> RoPE's angles by head size, or None without RoPE."""
    if config.positions != "rope":
        return lambda number: None
    sizes = {config.head_size} | ({config.index_size} if config.is_sparse else set())

    def of(settings: rope.Rope) -> dict[int, tuple[Array, Array]]:
        return {size: rope.angles(settings, size, positions) for size in sizes}

    everywhere = of(config.rope)
    if config.window_rope is None:
        return lambda number: everywhere
    in_windows = of(config.window_rope)
    windowed = jnp.array([config.windowed(i) for i in range(config.layers)])
    return lambda number: jax.tree.map(
        functools.partial(jnp.where, windowed[number]), in_windows, everywhere
    )


# -------------------------------------------------------------------------------------------- parts


class Layer(nnx.Module):
    """One layer, or with `stack` all layers' weights stacked, which `run` scans or slices."""

    def __init__(self, config: Config, rngs: nnx.Rngs, stack: Axes) -> None:
        embed, mlp = {"embed": config.width}, {"mlp": config.mlp_width}
        size = {"head_size": config.head_size}
        heads, kv_heads = {"heads": config.heads} | size, {"kv_heads": config.kv_heads} | size
        # residual outputs start at 1/sqrt(2 · layers), so that the variance of their sum is bounded
        small = 0.02 / math.sqrt(2 * config.layers)
        linear = functools.partial(Linear, rngs, stack=stack)
        norm = functools.partial(Norm, epsilon=config.norm_epsilon, stack=stack)
        self.attention_norm = norm(config.norm, axes=embed)
        self.query = linear(embed, heads, bias=config.qkv_bias)
        self.key = linear(embed, kv_heads, bias=config.qkv_bias)
        self.value = linear(embed, kv_heads, bias=config.qkv_bias)
        self.query_norm = norm("rms", axes=size) if config.qk_norm else None
        self.key_norm = norm("rms", axes=size) if config.qk_norm else None
        self.out = linear(heads, embed, bias=config.out_bias, deviation=small)
        self.attention_post_norm = norm(config.norm, axes=embed) if config.post_norms else None
        self.mlp_norm = norm(config.norm, axes=embed)
        self.mlp_post_norm = norm(config.norm, axes=embed) if config.post_norms else None
        self.gate = linear(embed, mlp, bias=config.mlp_bias) if config.gated else None
        self.up = linear(embed, mlp, bias=config.mlp_bias)
        self.down = linear(mlp, embed, bias=config.mlp_bias, deviation=small)
        # last, so that a seed gives the other parameters the values that they have with dense
        self.sparse = SparseAttention(config, rngs, stack) if config.is_sparse else None
        self.sinks = constant(stack | {"heads": config.heads}, 0.0) if config.sinks else None
        self.activation = config.activation
        # attention divides by sqrt(head_size)
        root = math.sqrt(config.head_size)
        self.query_factor = 1.0 if config.scale is None else config.scale * root

    def __call__(
        self, number: Any, x: Array, angles: Any, attend: Attend, state: Any, rows: Any = None
    ) -> tuple[Array, Any]:
        """x [B, T, width] -> x + attention + mlp, and the state that `attend` handed on.

        `angles` are RoPE's, by head size; None without it. `rows` takes the rows to compute.
        """
        taken = (lambda x: x) if rows is None else rows
        h = self.attention_norm(x)
        q, k, v = self.query(taken(h)), self.key(h), self.value(h)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is not None:
            own = angles[k.shape[-1]]
            q, k = rope.rotate(q, *map(taken, own)), rope.rotate(k, *own)
        if self.query_factor != 1:
            q = (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)
        more: tuple[Any, ...] = () if self.sparse is None else (self.sparse(h, angles),)
        if self.sinks is not None:
            more = (self.sinks[...],)
        out, state = attend(number, q, k, v, state, *more)
        x = taken(x) + _normed(self.attention_post_norm, self.out(out))
        return x + _normed(self.mlp_post_norm, self.mlp(self.mlp_norm(x))), state

    def mlp(self, x: Array) -> Array:
        """down(activation(gate x) · up x), or down(activation(up x)) without a gate."""
        bend = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(bend(self.up(x)))
        return self.down(bend(self.gate(x)) * self.up(x))


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


class Embedding(nnx.Module):
    """Token vectors, plus position vectors where positions are learned."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        embed = {"embed": config.width}
        self.tokens = normal(rngs, {"vocab": config.vocab_size} | embed, 0.02)
        learned = config.positions == "learned"
        self.positions = (
            normal(rngs, {"context": config.context} | embed, 0.01) if learned else None
        )
        self.factor = math.sqrt(config.width) if config.scaled_embedding else 1.0

    def __call__(self, tokens: Any, positions: Any, mesh: Mesh | None = None) -> Array:
        """[B, T] and [B, T] -> [B, T, width]."""
        # whole vectors first: XLA would replicate what is read by another axis than it lies on
        x = sharding.constrained(self.tokens[...], ("vocab", "width"), mesh)[tokens]
        x = x if self.factor == 1 else x * jnp.asarray(self.factor, x.dtype)
        if self.positions is None:
            return x
        return x + sharding.constrained(self.positions[...], ("context", "width"), mesh)[positions]
