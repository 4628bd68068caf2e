"""The operation signatures that every device implements.

Rows are tokens, flattened over all requests of a step; R is their number. A row's result depends on that row alone, never on R
or on its neighbours: reduction order is chosen by (N, K, dtype). Kernels allocate nothing, write every output element and use
64-bit addressing. Activations are f32 (CPU) or bf16/f16/f32 (GPU), never quantised in exact mode.

`Array` is whatever the device computes on: numpy arrays for Numba, torch tensors for torch and Triton. The engine only makes them
through `empty`/`asarray`, reads them back through `tohost`, and slices leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from power_lab.kernels.quants import QuantType

BLOCK = 64  # tokens of one KV block, everywhere
LONGEST_MATCH = 16  # tokens over which `Ops.recall` compares
SPLIT = 256  # keys of a canonical KV split on the CPU: reductions over keys are cut at absolute multiples of it. GPUs have their own

Array = Any
Activation = Literal["silu", "gelu_tanh"]
Progress: TypeAlias = "Callable[[int, int, str], None]"  # steps done, steps in all, name of the step


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [N, K] in its stored form, ready for one device.

    Attributes:
        type: how values are stored.
        rows: N, the output width.
        cols: K, the input width.
        data: the stored values; for quantised types uint8 [N, bytes per row], else [N, K] of the type's dtype. On the CPU this is a
            view of the mapped file: nothing is copied.
        operand: dtype of what it is multiplied by, "float32", "bfloat16", or "float16", whose values stand for others: kernels scale them.
    """

    type: QuantType
    rows: int
    cols: int
    data: Array
    operand: str = "float32"


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer, in pages of `BLOCK` tokens. The layout belongs to the device's kernels; page 0 is the dummy.

    Attributes:
        keys: [pages, ...] keys.
        values: [pages, ...] values.
        heads: KV heads.
        head_dim: values per head.
    """

    keys: Array
    values: Array
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's index arrays on the device.

    Attributes:
        ids: int32 [R], input token ids.
        positions: int32 [R], absolute positions.
        slots: int64 [R], page * BLOCK + offset where each row's KV goes.
        table_of: int32 [R], which row of `tables` each row uses.
        tables: int32 [S, max pages], block tables, padded with 0 (the dummy page).
        sampled: int32 [Q], rows whose logits are wanted.
        before: int64 [R], slot of the position before each row's, -1 at position 0; None where nobody reads it.
        groups: what `Ops.group` found of these positions and tables; None before that.
    """

    ids: Array
    positions: Array
    slots: Array
    table_of: Array
    tables: Array
    sampled: Array
    before: Array | None = None
    groups: Mapping[int, Array] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Onward:
    """What ties a step to the one before it, whose outcome is known on the device only. S counts table rows, as in `Batch.tables`.

    Attributes:
        windows: int32 [S, 3]: each sequence's first sampled row, its first draw, and how many it has of either; 0: nothing is drawn.
        came: int32 [S]: the mark that each sequence goes on from, -1: it is where the host says.
        source: int32 [R], the ids of its rows: 0 stands for the host's, 1 for the mark's token, 2 + k for draft k.
    """

    windows: Array
    came: Array
    source: Array


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Where `Ops.resume` puts what depends on marks, each array as large as the one that it is made from.

    Attributes:
        ids, positions, slots, before: as of `Batch`. draws: int64 [Q], positions of draws. last: int32 [R]; anchors: int32 [any]; either
            None where that is not asked for, before where the batch has none.
    """

    ids: Array
    positions: Array
    slots: Array
    draws: Array
    before: Array | None = None
    last: Array | None = None
    anchors: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """Sampling controls for Q logit rows, as arrays on the device (structure of arrays).

    Attributes:
        temperature: float32 [Q]; 0 is greedy (largest logit, lowest id on a tie).
        top_k: int32 [Q]; 0 is off.
        top_p: float32 [Q]; 1 is off. Smallest set of most likely tokens, of those that top-k left, whose share of their mass
            reaches top_p; always at least one. Among equal tokens the lower ids come first, here and in top-k.
        min_p: float32 [Q]; 0 is off. Keeps tokens with probability >= min_p * the largest.
        repetition: float32 [Q]; 1 is off. Positive logits of tokens in the history are divided by it, negative ones multiplied.
        presence: float32 [Q]; 0 is off. Subtracted once from logits of tokens generated so far.
        seeds: int64 [Q], the bits of the u64.
        positions: int64 [Q], absolute position of the token that is drawn; the noise is keyed by (seed, position, token id).
        history: int32 [H], concatenated tokens before each drawn token (prompt, output, drafts).
        history_span: int64 [Q, 3]: start, start of the generated part, end, in `history`.
        bias_ids: int32 [B], bias_values: float32 [B], bias_span: int64 [Q, 2]: start and end of each row's logit biases.

    The lists `history`, `bias_ids` and `bias_values` have at least one element, whether or not a span names it.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition: Array
    presence: Array
    seeds: Array
    positions: Array
    history: Array
    history_span: Array
    bias_ids: Array
    bias_values: Array
    bias_span: Array


Draw = Literal["greedy", "random", "limited"]
"""What rows of a step may ask for: all temperatures 0; any temperature and min-p; top-k and top-p too."""


class Graph(Protocol):
    """Recorded operations. nbytes: what they occupy besides the arrays."""

    @property
    def nbytes(self) -> int: ...


class Staging(Protocol):
    """Host memory from which an array on the device is filled."""

    def open(self) -> np.ndarray:
        """The memory, uint8 of the array's size: free to be written, whatever earlier copies are still on their way."""
        ...

    def send(self, nbytes: int) -> None:
        """Copy the first bytes to the array, after all work before and before all work after."""
        ...


class Fetched(Protocol):
    """Arrays on their way to the host."""

    def get(self) -> tuple[np.ndarray, ...]:
        """Wait for them; may be called again."""
        ...

    @property
    def seconds(self) -> float:
        """From the step's begin to the arrival, on the device's clock; 0 where it has none. After `get`."""
        ...


class Ops(Protocol):
    """The operation table of one device. It keeps plans and scratch for weights it has seen, and no requests; one caller at a time.

    Attributes:
        name, mode: of the device's path. The residual stream, queries, keys and values on their way, and logits are float32 everywhere.
        kv_dtype: of the caches.
        asynchronous: whether operations return before they have run, so that the next step can be planned meanwhile; sampling is then
            captured with the forward pass.
        row_buckets: rows that a captured step may have, ascending; steps are padded up to one. Empty: any count, unpadded.
        compiles_for: compute capability (as 90) of the GPU for which kernels are compiled at their first launch, unless they are found in
            the compiler's cache; 0 where they are compiled by `warm_up` and `prepare`.
        nbytes: scratch that is allocated now.
    """

    name: str
    mode: str
    kv_dtype: str
    asynchronous: bool
    row_buckets: tuple[int, ...]
    compiles_for: int

    @property
    def nbytes(self) -> int: ...

    def digest(self) -> str:
        """Hex SHA-256 over what decides bits: instruction path, kernel sources, compiler versions, reduction plans."""
        ...

    def reasons(self) -> tuple[str, ...]:
        """Why this device's path is as it is (threading, kernel cache), for `lab.explain()`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array: ...

    def asarray(self, host: np.ndarray) -> Array: ...

    def tohost(self, array: Array) -> np.ndarray: ...

    def view(self, raw: Array, first: int, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of this shape in the bytes `raw` (uint8), from byte `first` on, a multiple of its values' size."""
        ...

    def staging(self, raw: Array) -> Staging:
        """Host memory to fill the bytes `raw` (uint8) from."""
        ...

    def fetch(self, *arrays: Array) -> Fetched:
        """Begin to copy arrays to the host; later work may overwrite them."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Around what is launched for one step, its uploads and fetches included."""
        ...

    def reserve(
        self, rows: int, sampled: int, vocabulary: int, attentions: Iterable[tuple[int, int, int]], pages: int
    ) -> None:
        """Make scratch for every step of up to so many rows and logit rows, before any is captured.

        attentions: (query heads, KV heads, head_dim) of the layers. pages: of the longest sequence. Without it, scratch grows as needed.
        """
        ...

    def wait(self) -> None:
        """Until all that was launched has run."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that the device has left; None where its memory is the machine's."""
        ...

    def operand(self, types: Iterable[QuantType]) -> str:
        """`Weight.operand` of all matrices of a model that has matrices of these types: its linears read the same activations."""
        ...

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        """Prepare a stored matrix for this device. Raises ModelFileError naming the type if it has no kernel.

        operand: of the model; "" for that of a matrix alone.

        `host` is any array of the matrix's bytes; rows of a larger matrix (one of fused projections) are such an array, and on the CPU
        nothing is copied.
        """
        ...

    def vector(self, type: QuantType, host: np.ndarray) -> Array:
        """A stored vector (norm weights) as f32."""
        ...

    def kv_cache(self, pages: int, heads: int, head_dim: int) -> KVCache: ...

    def embed(self, table: Weight, ids: Array, out: Array, scale: float = 1.0, drawn: Array | None = None) -> None:
        """out[r] = scale * table[ids[r]], dequantised. ids int32 [R], out [R, K], f32 or an operand.

        drawn: int32, the tokens of the step before: an id i below 0 stands for drawn[-i - 1]. A row whose id is not in the table, as
        a token that could not be drawn, becomes NaN.
        """
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, row by row. x, out f32 [R, D]."""
        ...

    def add_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        """x += delta, or x += rms_norm(delta, post); then out = rms_norm(x, weight).

        x, delta, out f32 [R, D]; post and weight f32 [D]. With `post`, delta is overwritten; without `weight`, out is not touched.
        """
        ...

    def gather_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array, eps: float, rows: Array, out: Array
    ) -> None:
        """out[i] = what `add_rms_norm` makes of row rows[i]. rows int32 [Q], out [Q, D]; x and delta mean nothing afterwards."""
        ...

    def parts(self, out: Array) -> Array:
        """What `linear` may be given for `out` [R, N], and then one `add_rms_norm` (as delta) or `rope_write`, before any other product:
        where the device has sums of splits to add, the reader adds them, with the same bits. `rope_write` leaves queries in `out`, and
        otherwise `out` means nothing. Tables without such sums return `out`.
        """
        ...

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        """out[:, n] = sum_k x[:, k] * W[n, k] + bias[n], the weights stacked along N (fused QKV).

        x f32 [R, K], out f32 [R, sum N], bias f32 [sum N].
        """
        ...

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        """out = f(x Wg^T) * (x Wu^T). x f32 [R, K], out f32 [R, N].

        f is silu(g) = g * sigmoid(g), or gelu_tanh(g) = g * sigmoid(2u) with u = sqrt(2 / pi) * (g + 0.044715 g^3).
        """
        ...

    def rope_tables(self, positions: int, frequencies: Sequence[float], magnitude: float) -> Array:
        """f32 [positions, len(frequencies), 2]: magnitude times cosine and sine of position * frequency, computed in f64."""
        ...

    def rope_write(
        self,
        qkv: Array,
        batch: Batch,
        rope: Array | None,
        interleaved: bool,
        q_heads: int,
        cache: KVCache,
        norms: tuple[Array, Array] | None = None,
        eps: float = 0.0,
    ) -> None:
        """Normalise and rotate the queries in place, and write keys, treated alike, and values to their slots.

        qkv f32 [R, (q_heads + 2 * kv_heads) * head_dim]; q_heads may be 0. Or [R, q_heads * head_dim]: queries alone, nothing is
        written. rope f32 [positions, pairs, 2] or None for no rotation; a head's first
        2 * pairs values turn. Pairs are (2i, 2i+1) when `interleaved` (GGUF's Llama order), else (i, i + pairs). norms: RMS weights
        of queries and keys, each of head_dim values (every head by itself) or of all heads' values together.
        """
        ...

    def group(self, batch: Batch, attentions: Iterable[tuple[int, int, int]], room: Array) -> Batch:
        """The batch with what `attention` asks of its rows together: found once, behind what moves them, for all layers.

        attentions: (query heads, KV heads, head_dim) of the layers. room: int32, R + 1 values for each different one of these, which are
        the returned batch's as long as layers read it.
        """
        ...

    def attention(
        self,
        qkv: Array,
        batch: Batch,
        q_heads: int,
        scale: float,
        cache: KVCache,
        out: Array,
        window: int = 0,
        softcap: float = 0.0,
        temperature: Array | None = None,
        sinks: Array | None = None,
    ) -> None:
        """Causal grouped-query attention of each row over positions 0..positions[r], KV read from the pages only.

        qkv as `rope_write` left it, batch as `group` returned it. Rows of one table may share a position, as those of a block that sees
        all of itself. Keys are reduced in canonical splits at absolute positions, combined in order. out f32 [R, q_heads * head_dim].
        window: only so many last keys, the row's own included; 0 is all. softcap: scores s become softcap * tanh(s / softcap).
        temperature: f32 [positions], a further factor on the scores of a row at that position.
        sinks: f32 [q_heads], a logit of each head that takes its share of the softmax and has no value.
        """
        ...

    def softcap(self, x: Array, cap: float) -> None:
        """x = cap * tanh(x / cap), in place. x f32 [R, D]."""
        ...

    def tap(
        self,
        x: Array,
        delta: Array | None,
        post: Array | None,
        eps: float,
        out: Array,
        column: int,
        slots: Array | None,
    ) -> None:
        """out[slots[r], column : column + D] = x[r], or x[r] + delta[r], or x[r] + rms_norm(delta[r], post): what `add_rms_norm` with
        a `weight` makes of x, rounded to what `out` holds.

        x, delta f32 [R, D] are only read; post f32 [D]; out an operand or f32 [any, W]; slots int64 [R], each in one row only. Without
        `slots`, row r goes to row r. A row whose slot is not in `out` goes nowhere.
        """
        ...

    def take(self, table: Array, index: Array, out: Array) -> None:
        """out[r] = table[index[r]], zeros where index[r] < 0, NaN where it is beyond the table.

        table an operand [any, W], index int64 [R], out an operand or f32 [R, W].
        """
        ...

    def merge(
        self,
        table: Weight,
        ids: Array,
        scale: float,
        drawn: Array | None,
        first: Array,
        states: Array,
        index: Array | None,
        second: Array,
        eps: float,
        out: Array,
    ) -> None:
        """out[r] = rms_norm(scale * table[ids[r]], first) beside rms_norm(states[index[r]], second): `embed`, `take` and `rms_norm` of
        both, as a NextN head reads them. Without `index`, row r of `states` is that of row r.

        ids, drawn as in `embed`, index as in `take`; first, second f32 [D]; states an operand or f32 [any, D]; out an operand [R, 2 D].
        """
        ...

    def scatter_columns(self, values: Array, ids: Array, out: Array) -> None:
        """out[r, ids[n]] = values[r, n], and -inf in the columns that `ids` does not name.

        values f32 [R, N], ids int32 [N], ascending, each once, out f32 [R, V].
        """
        ...

    def dynamic_conv(self, x: Array, coef: Array, base: Array, side: int, previous: Array, out: Array) -> None:
        """Grouped dynamic depthwise convolution over the rows of a block (DFlash2).

        out[r, c] = sum over t of (base[side, t, c] + coef[r, side, t, c // (D / G)]) * x[r_t, c], in the order of t, with r_0 = r and
        r_(t + 1) = previous[r_t]. previous int32 [R]: the row before each row in its block, -1 at its start, where the sum ends.
        x and out [R, D], each f32 or an operand, not the same array; coef f32 [R, 2 * taps * G], as a projection gives it;
        base f32 [2, taps, D]; side 0 or 1.
        """
        ...

    def mark(self, batch: Batch, onward: Onward, drawn: Array, marks: Array) -> None:
        """marks[s] = where sequence s stands after this step: (the position of its next row, the id of that row).

        Its drafts are the ids of its sampled rows behind the first; they are kept while each is what was drawn in the row before it, and
        the draw behind the last of these is the next row's id. drawn int32 [Q]; marks int64 [any, 2]; a sequence that draws nothing
        leaves its mark as it is.
        """
        ...

    def resume(
        self,
        batch: Batch,
        onward: Onward,
        marks: Array,
        drafts: Array,
        draws: Array,
        moved: Moved,
        last: Array | None = None,
        anchors: Array | None = None,
    ) -> None:
        """Write to `moved` the rows of sequences that go on from a mark, where it says; those of others as they are.

        What the host wrote is relative to the mark's position: `batch.positions`, `draws` (int64 [Q], of the tokens that rows
        `batch.sampled` draw) and `last` (int32 [R]) grow by it. Of their rows, a slot below 0 becomes that of the row's position, and
        `before` below -1 that of the position before. ids come from where `onward.source` says; what could not be drawn becomes 0.
        anchors int32 [any]: the first S become their marks' tokens; others are not written. marks as `mark` made them; drafts int32.
        None of what is read changes, so that the host need not write it again for the next step.
        """
        ...

    def note(self, ids: Array, drawn: Array | None, slots: Array, told: Array) -> None:
        """told[slots[r]] = ids[r], the token of each row. ids, drawn as in `embed`; slots int64 [R]; told int32 [any]."""
        ...

    def recall(
        self,
        told: Array,
        tables: Array,
        came: Array,
        marks: Array,
        least: int,
        source: Array,
        drafts: Array,
        out: Array,
    ) -> None:
        """out[s] = what followed the longest match of sequence s's end in itself, or drafts[source[s, k]] where that has fewer than `least`
        tokens and source[s, k] is not below 0; 0 where there is neither.

        Sequence s ends with the token of mark came[s], at its position; those before are `told` at the slots that `tables` gives. Matches
        are compared over `LONGEST_MATCH` tokens at most; of equals the last counts. What followed goes on from its beginning where it comes
        to the sequence's end. told as `note` left it; tables int32 [S, pages]; came int32 [S], -1: nobody's place; marks as in `mark`;
        source int32 [S, W]; drafts int32 [any]; out int32 [S, W].
        """
        ...

    def sample(
        self, logits: Array, rows: SampleRows, tokens: Array, draw: Draw = "limited", ids: Array | None = None
    ) -> None:
        """Draw one token per row: penalties, bias, temperature, top-k, top-p, min-p, then Gumbel-max with counter noise.

        logits f32 [Q, V] are read, not changed. tokens int32 [Q]. The noise is `reference.gumbel`, the same on every device.
        A row that holds NaN or has no finite largest logit gets -1, so that it fails alone and not with its neighbours.
        draw: what no row goes beyond; it decides no bits, only which passes run.
        ids: int32 [V], ascending, the tokens that the columns mean: what `scatter_columns` and a draw among all would give. Rows then
            have neither penalties nor biases.
        """
        ...

    def logprobs(self, logits: Array, tokens: Array, top: int) -> tuple[Array, Array, Array]:
        """Log-softmax of the raw logits: (f32 [Q] of `tokens`, int32 [Q, top] ids, f32 [Q, top] values, best first).

        A token that is not in 0..V-1 gets NaN.
        """
        ...

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        """Record the operations that `forward` calls, without running them; returns them with its result.

        None if this table cannot: `forward` is to be called each time. A graph refers to the arrays that it was recorded on. Where
        kernels are compiled at their first launch, `forward` must have been called before.
        """
        ...

    def replay(self, graph: Graph) -> None:
        """Run the recorded operations on what their arrays hold now."""
        ...

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile (or load from cache) every kernel that all models use; `progress(done, total, name)` is called as they come."""
        ...

    def prepare(self, types: Iterable[QuantType], progress: Progress | None = None) -> None:
        """Compile (or load from cache) what reads weights of these types. A type not named here is prepared by its first weight."""
        ...

    def close(self) -> None:
        """Give back threads and the like. The operations still work afterwards, perhaps slower."""
        ...
