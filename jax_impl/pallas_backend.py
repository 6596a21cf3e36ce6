"""The one module that knows Pallas, its GPU backend and the differences between JAX versions.

Kernels run on Mosaic GPU (Hopper and newer) through `pl.kernel` on a `plgpu.Mesh`, which every supported JAX has.
A kernel body reads arrays and refs by index; this module gives it the few words it needs (`grid_index`, `load`, `span`,
`when`) and launches it. In place means: the array is turned into a ref, the kernel writes the ref, and the frozen ref
is the result; on a donated argument under `jit` that is the same buffer.

    JAX 0.10   interpreter parameters are private, its refs want an explicit memory space, `load` takes the index
    JAX 0.11+  public parameters, refs without a memory space, `load` takes a view of the ref
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir as mlir_ir
from jaxlib.mlir.dialects import arith as mlir_arith
from jaxlib.mlir.dialects import llvm as mlir_llvm

from jax_impl.checks import Implementation, target_platform
from jax_impl.layout import ConvCacheSpec

# Untyped, because their names and signatures are not the same in every version.
plgpu: Any = mosaic_gpu
mgpu: Any = mosaic
ir: Any = mlir_ir
arith: Any = mlir_arith
llvm: Any = mlir_llvm

_IS_0_10 = jax.__version_info__ < (0, 11)

MIN_COMPUTE_CAPABILITY = 9.0  # Hopper
LANES = 128  # threads of a block; stores are not masked, so a block covers a multiple of this many channels
MAX_GRID = 65_535  # limit of every grid axis but the last
VECTOR_BYTES = 16  # widest access of one thread

when = pl.when
span = pl.ds
grid_index = lax.axis_index


def unsupported(spec: ConvCacheSpec, requests: int) -> str | None:
    """Why the kernels cannot take this geometry and number of requests, as an error message; None when they can."""
    if requests > MAX_GRID:
        return (
            f"`implementation`: expected at most {MAX_GRID} requests (both index sets of a commit together) for the "
            f'Pallas kernels, got {requests}. Use "xla", or None to fall back to it.'
        )
    if spec.conv_dim % LANES:
        return (
            f"`implementation`: expected conv_dim % {LANES} = 0 for the Pallas kernels, "
            f'got conv_dim = {spec.conv_dim}. Use "xla", or None to fall back to it.'
        )
    return None


def choose(implementation: Implementation | None, specs: Sequence[ConvCacheSpec], requests: int) -> Implementation:
    """The implementation to run: a named kernel is obeyed or raises, None takes the kernels where they run.

    Raises:
      ValueError: "pallas" or "pallas_interpret" with a geometry the kernels cannot take, or "pallas" without a GPU.
    """
    reasons = [reason for spec in specs if (reason := unsupported(spec, requests))]
    if implementation is None:
        return "pallas" if runs_here() and not reasons else "xla"
    if implementation == "pallas" and target_platform() != "gpu":
        reasons.append(
            f'`implementation`: expected an NVIDIA GPU for "pallas", got platform {target_platform()}. '
            'Use "pallas_interpret" to run the kernel on the CPU, or "xla".'
        )
    if reasons:
        raise ValueError("\n".join(dict.fromkeys(reasons)))
    return implementation


def runs_here() -> bool:
    """Whether the default device is a GPU that the kernels run on."""
    if target_platform() != "gpu" or jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", "0.0")) >= MIN_COMPUTE_CAPABILITY


def load_runs(
    ref: Any, index: tuple[Any, ...], shape: tuple[int, int], vector: int, interpret: bool, *, read_only: bool = True
) -> list[jax.Array]:
    """Reads the (run, channel) tile `ref[index]` of runs of contiguous channels; each result is `(channels,)`.

    `vector` neighbouring channels go to one thread. `read_only` says that this kernel never writes the array, so that
    the read may go through the read-only cache.
    """
    runs, channels = shape
    if interpret:
        tile = ref[index]
        return [tile[run] for run in range(runs)]
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)
    of_run = plgpu.ShapeDtypeStruct((channels,), ref.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[of_run] * runs)
    def read(_: Any, tile: Any) -> list[Any]:
        kind = ir.MemRefType(tile.type)
        pitch = kind.get_strides_and_offset()[0][0]
        pointers = _thread_pointers(tile, channels, 1, vector)
        return [
            _fragment([_load(place, run * pitch, vector, kind.element_type, read_only) for place in pointers], layout)
            for run in range(runs)
        ]

    return read(ref.at[index])


def store_runs(ref: Any, index: tuple[Any, ...], values: Mapping[int, jax.Array], vector: int, interpret: bool) -> None:
    """Writes some runs of the (run, channel) tile `ref[index]`, by their number in it; the inverse of `load_runs`."""
    if interpret:
        for run, value in values.items():
            ref[(*index[:-2], index[-2].start + run, index[-1])] = value
        return
    (channels,) = next(iter(values.values())).shape
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[layout] * len(values)))
    def write(_: Any, tile: Any, *fragments: Any) -> None:
        for run, fragment in zip(values, fragments, strict=True):
            for place, register in zip(_run_places(tile, channels, run, vector), fragment.registers, strict=True):
                llvm.store(register, place)

    write(ref.at[index], *values.values())


def zeros(channels: int, dtype: Any, vector: int, interpret: bool) -> jax.Array:
    """Zeros `(channels,)` as a run that `store_runs` takes."""
    value = jnp.zeros((channels,), dtype)
    return value if interpret else plgpu.layout_cast(value, plgpu.Layout.WG_STRIDED((channels,), vec_size=vector))


def _run_places(tile: Any, channels: int, run: int, vector: int) -> list[Any]:
    """Where this thread's channels of one run begin in a (run, channel) tile; one place a register."""
    kind = ir.MemRefType(tile.type)
    pitch = kind.get_strides_and_offset()[0][0]
    return [_offset(place, run * pitch, kind.element_type) for place in _thread_pointers(tile, channels, 1, vector)]


def silu(value: jax.Array, vector: int, interpret: bool) -> jax.Array:
    """value * sigmoid(value) in float32 to about 2^-21, zero below about -87: for results that are rounded to 16 bits.

    The exact exponential and division take more instructions than everything else in the kernel together, enough to
    keep it from the memory limit; the hardware's approximations take five.
    """
    if interpret:
        return value * jax.nn.sigmoid(value)
    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=vector)
    kind = plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=kind)
    def apply(_: Any, values: Any) -> Any:
        f32 = ir.F32Type.get()
        assembly = """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 e, e;
            mul.f32 $0, $1, e;
        }"""  # 0fBFB8AA3B is -log2(e)

        def one(element: Any) -> Any:
            return llvm.inline_asm(f32, [element], assembly, "=f,f", has_side_effects=False)

        registers = [
            _vector([one(_extract(register, lane)) for lane in range(vector)]) for register in values.registers
        ]
        return _fragment(registers, layout)

    return apply(value)


def load_tile(ref: Any, index: tuple[Any, ...], shape: tuple[int, int], interpret: bool) -> jax.Array:
    """Reads the strided (channel, column) tile `ref[index]` element by element, in the order its storage has."""
    if interpret:
        return ref[index]
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
    return plgpu.load(ref, index, layout=layout) if _IS_0_10 else plgpu.load(ref.at[index], layout=layout)


def load_columns(
    ref: Any, index: tuple[Any, ...], shape: tuple[int, int], vector: int, interpret: bool, *, read_only: bool = True
) -> list[jax.Array]:
    """Reads the contiguous (channel, column) tile `ref[index]` and returns its columns, each `(channels,)`.

    A thread reads the whole columns of its `vector` neighbouring channels, one run of memory, in the widest accesses it
    can be cut into (`run_piece`) and sorts them in registers. Reading column by column instead would touch every
    32-byte sector once per column.
    """
    channels, columns = shape
    if interpret:
        tile = ref[index]
        return [tile[:, column] for column in range(columns)]
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)
    of_column = plgpu.ShapeDtypeStruct((channels,), ref.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=[of_column] * columns)
    def read(_: Any, tile: Any) -> list[Any]:
        element = ir.MemRefType(tile.type).element_type
        piece, registers = run_piece(vector * columns, ref.dtype.itemsize), [[] for _ in range(columns)]
        for place in _thread_pointers(tile, channels, columns, vector):
            wide = [_load(place, first, piece, element, read_only) for first in range(0, vector * columns, piece)]
            flat = [_extract(value, lane) for value in wide for lane in range(piece)]
            for column in range(columns):
                registers[column].append(_vector([flat[lane * columns + column] for lane in range(vector)]))
        return [_fragment(one, layout) for one in registers]

    return read(ref.at[index])


def store_columns(ref: Any, index: tuple[Any, ...], columns: Sequence[jax.Array], vector: int, interpret: bool) -> None:
    """Writes all columns of the contiguous (channel, column) tile `ref[index]`: the inverse of `load_columns`."""
    if interpret:
        ref[index] = jnp.stack(columns, axis=-1)
        return
    (channels,) = columns[0].shape
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[layout] * len(columns)))
    def write(_: Any, tile: Any, *values: Any) -> None:
        element, piece = ir.MemRefType(tile.type).element_type, run_piece(vector * len(values), ref.dtype.itemsize)
        for number, place in enumerate(_thread_pointers(tile, channels, len(values), vector)):
            flat = [_extract(value.registers[number], lane) for lane in range(vector) for value in values]
            for first in range(0, len(flat), piece):
                llvm.store(_vector(flat[first : first + piece]), _offset(place, first, element))

    write(ref.at[index], *columns)


def run_piece(elements: int, item_bytes: int) -> int:
    """Elements of one access to a thread's run of so many: the most bytes, a power of two up to 16, that divide it.

    The threads' runs follow each other from a multiple of 128 elements on, so all accesses are aligned. Each store is a
    transaction for every sector it touches, and neighbouring threads' stores lie a run apart: wide ones are fewer.

    >>> run_piece(2 * 3, 2), run_piece(2 * 10, 2), run_piece(4 * 10, 2), run_piece(3, 4)
    (2, 4, 8, 1)
    """
    run_bytes = elements * item_bytes
    return min(VECTOR_BYTES, run_bytes & -run_bytes) // item_bytes


def store_column(
    ref: Any, index: tuple[Any, ...], column: int, columns: int, value: jax.Array, vector: int, interpret: bool
) -> None:
    """Writes one column of the tile `ref[index]` of `columns` columns, element by element, and no other."""
    if interpret:
        ref[(*index[:-1], column)] = value
        return
    (channels,) = value.shape
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def write(_: Any, tile: Any, values: Any) -> None:
        element = ir.MemRefType(tile.type).element_type
        for number, place in enumerate(_thread_pointers(tile, channels, columns, vector)):
            for lane in range(vector):
                llvm.store(_extract(values.registers[number], lane), _offset(place, lane * columns + column, element))

    write(ref.at[index], value)


def _thread_pointers(tile: Any, channels: int, pitch: int, vector: int) -> list[Any]:
    """Where this thread's channels begin in a tile whose channels are `pitch` elements apart; one place a register."""
    element, index = ir.MemRefType(tile.type).element_type, ir.IndexType.get()
    i64 = ir.IntegerType.get_signless(64)
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(tile))
    places = []
    for first_channel in mgpu.WGStridedFragLayout((channels,), vector).linear_thread_idxs():
        elements = arith.muli(first_channel, arith.constant(index, pitch)) if pitch > 1 else first_channel
        places.append(mgpu.utils.getelementptr(base, [arith.index_cast(i64, elements)], element))
    return places


def load_either(
    first: tuple[Any, tuple[Any, ...]],
    second: tuple[Any, tuple[Any, ...]],
    take_second: jax.Array,
    channels: int,
    vector: int,
    interpret: bool,
) -> jax.Array:
    """One run of channels `(channels,)` out of one of two arrays, each given as a ref and the index of the run in it.

    The address is chosen, not the value, so the other array is not read. Channels may be strided in either.
    """
    if interpret:
        return jnp.where(take_second, second[0][second[1]], first[0][first[1]])
    layout = plgpu.Layout.WG_STRIDED((channels,), vec_size=vector)
    of_run = plgpu.ShapeDtypeStruct((channels,), first[0].dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), layout), return_type=of_run)
    def read(_: Any, one: Any, other: Any, choice: Any) -> Any:
        element, take_other = ir.MemRefType(one.type).element_type, _is_set(choice)
        pitches = [ir.MemRefType(tile.type).get_strides_and_offset()[0][0] for tile in (one, other)]
        places = [
            _thread_pointers(tile, channels, pitch, vector) for tile, pitch in zip((one, other), pitches, strict=True)
        ]
        registers = []
        for here, there in zip(*places, strict=True):
            place = arith.select(take_other, there, here)
            if pitches == [1, 1]:
                registers.append(_load(place, 0, vector, element, False))
                continue
            lanes = [
                arith.select(
                    take_other, _offset(there, lane * pitches[1], element), _offset(here, lane * pitches[0], element)
                )
                for lane in range(vector)
            ]
            registers.append(_vector([_extract(_load(lane, 0, 1, element, False), 0) for lane in lanes]))
        return _fragment(registers, layout)

    return read(first[0].at[first[1]], second[0].at[second[1]], _uniform(take_second, layout))


def choose_runs(
    link: jax.Array, candidates: Sequence[Sequence[jax.Array]], vector: int, interpret: bool
) -> list[jax.Array]:
    """The runs of candidate number `link + 1`, of the first for a link outside; candidates have equally many."""
    if interpret or len(candidates) == 1:
        chosen = list(candidates[0])
        for number, candidate in enumerate(candidates[1:]):
            chosen = [jnp.where(link == number, b, a) for a, b in zip(chosen, candidate, strict=True)]
        return chosen
    layout = plgpu.Layout.WG_STRIDED(candidates[0][0].shape, vec_size=vector)
    kinds = [plgpu.ShapeDtypeStruct(one.shape, one.dtype, layout=layout) for one in candidates[0]]
    flat, size, count = [run for candidate in candidates for run in candidate], len(kinds), len(candidates)

    @plgpu.inline_mgpu(arg_types=(layout, *[layout] * len(flat)), return_type=kinds)
    def pick(_: Any, number: Any, *runs: Any) -> list[Any]:
        index = _extract(number.registers[0], 0)
        chosen = [run.registers for run in runs[:size]]
        for candidate in range(1, count):
            wanted = arith.constant(ir.IntegerType.get_signless(32), candidate - 1)
            is_it = arith.cmpi(arith.CmpIPredicate.eq, index, wanted)
            others = [run.registers for run in runs[candidate * size : (candidate + 1) * size]]
            chosen = [
                [arith.select(is_it, there, here) for here, there in zip(one, other, strict=True)]
                for one, other in zip(chosen, others, strict=True)
            ]
        return [_fragment(registers, layout) for registers in chosen]

    return pick(_uniform(link, layout), *flat)


def zero_unless(kept: jax.Array, value: jax.Array, vector: int, interpret: bool) -> jax.Array:
    """A run as it is where the scalar `kept` is set, else zeros; chosen by whole registers."""
    if interpret:
        return jnp.where(kept, value, jnp.zeros_like(value))
    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=vector)
    kind = plgpu.ShapeDtypeStruct(value.shape, value.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout, layout), return_type=kind)
    def pick(_: Any, choice: Any, values: Any, nothing: Any) -> Any:
        is_kept = _is_set(choice)
        pairs = zip(values.registers.flat, nothing.registers.flat, strict=True)
        return _fragment([arith.select(is_kept, one, zero) for one, zero in pairs], layout)

    return pick(_uniform(kept, layout), value, zeros(value.shape[0], value.dtype, vector, interpret))


def _uniform(value: jax.Array, layout: Any) -> jax.Array:
    """A scalar as an array of equal int32, the form in which assembly takes it."""
    spread = lax.broadcast(value.astype(jnp.int32), layout.to_mgpu().shape)
    return plgpu.layout_cast(spread, layout)


def _is_set(choice: Any) -> Any:
    """Whether a `_uniform` value is not zero."""
    word = _extract(choice.registers.flat[0], 0)
    return arith.cmpi(arith.CmpIPredicate.ne, word, arith.constant(ir.IntegerType.get_signless(32), 0))


def _load(pointer: Any, first: int, vector: int, element: Any, read_only: bool) -> Any:
    """`vector` elements from `first` elements behind `pointer`, in accesses of up to 16 bytes.

    Written as assembly, so that the compiler keeps the loads together and in this order, ahead of the arithmetic.
    """
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    cache = ".nc" if read_only else ""
    item_bytes = mgpu.utils.bitwidth(element) // 8
    start, num_bytes = first * item_bytes, vector * item_bytes
    if num_bytes == 2:
        assembly = f"ld.global{cache}.b16 $0, [$1+{start}];"
        return _bitcast(_vector([llvm.inline_asm(i16, [pointer], assembly, "=h,l", has_side_effects=True)]), 1, element)
    words = []
    for chunk in range(0, num_bytes, VECTOR_BYTES):
        count = min(VECTOR_BYTES, num_bytes - chunk) // 4
        names = ", ".join(f"${number}" for number in range(count))
        width, target = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>") if count > 1 else i32
        assembly = f"ld.global{cache}{width}.b32 {target}, [${count}+{start + chunk}];"
        constraints = ",".join([*["=r"] * count, "l"])
        value = llvm.inline_asm(kind, [pointer], assembly, constraints, has_side_effects=True)
        words += [llvm.extractvalue(i32, value, [number]) for number in range(count)] if count > 1 else [value]
    return _bitcast(_vector(words), vector, element)


def _bitcast(value: Any, vector: int, element: Any) -> Any:
    return llvm.bitcast(_vector_type(vector, element), value)


def _fragment(registers: Sequence[Any], layout: Any) -> Any:
    """Registers of one thread as an array in `layout`."""
    array = np.empty((len(registers),), dtype=object)
    array[:] = registers
    return mgpu.FragmentedArray(_registers=array, _layout=layout.to_mgpu(), _is_signed=None)


def _offset(pointer: Any, elements: int, element: Any) -> Any:
    return mgpu.utils.getelementptr(pointer, [elements], element)


def _vector_type(size: int, element: Any) -> Any:
    return ir.VectorType.get((size,), element)


def _extract(value: Any, lane: int) -> Any:
    return llvm.extractelement(value, arith.constant(ir.IntegerType.get_signless(32), lane))


def _vector(elements: Sequence[Any]) -> Any:
    value = llvm.mlir_undef(_vector_type(len(elements), elements[0].type))
    for lane, element in enumerate(elements):
        value = llvm.insertelement(value, element, arith.constant(ir.IntegerType.get_signless(32), lane))
    return value


def call_in_place(
    body: Callable[..., None],
    inputs: Any,
    updated: tuple[jax.Array, ...],
    fresh: tuple[jax.ShapeDtypeStruct, ...] = (),
    *,
    grid: Mapping[str, int],
    name: str,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Runs `body(inputs, *updated_refs, *fresh_refs)` once per grid point. Called while tracing, under `jit`.

    Args:
      body: the kernel; `inputs` arrives as the same pytree, of refs.
      inputs: pytree of arrays that the kernel only reads.
      updated: arrays that keep their bits wherever the kernel does not store.
      fresh: shapes of new arrays, of which the kernel must write every element.
      grid: size of each named axis, none of them 0; the last one is fastest.
      name: of the kernel, as profilers show it.
      interpret: run on the CPU.

    Returns:
      The updated arrays, then the fresh ones.

    Raises:
      ValueError: the program is for several devices and there is no shard_map around the call; says so when it is
        lowered, or while it is traced for arrays whose types say how they are divided.
    """
    for array in (*jax.tree.leaves(inputs), *updated):
        if any(jax.typeof(array).sharding.spec):
            _raise_not_on_one_device(f"an array of type {jax.typeof(array)}")
    inputs = jax.tree.map(lambda one: _on_one_device.bind(one) if one.dtype == jnp.int32 else one, inputs)
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid))
    parameters = _interpret_parameters(interpret)

    refs = tuple(_new_ref(array, interpret) for array in updated)
    # No barriers between accesses: the threads of a block share nothing, each reads and writes its own channels only.
    compiler = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    run: Any = pl.kernel(body, out_type=fresh, mesh=mesh, name=name, compiler_params=compiler, interpret=parameters)
    made = run(inputs, *refs)
    return (*(jax.freeze(ref) for ref in refs), *(made or ()))


# The identity, on a kernel's index arrays. XLA cannot divide a kernel: in a program of several devices it would gather
# pool and buffer on each of them, without a word. How arguments are divided is not known while jit is traced, unless
# their types say it; the number of devices is known when the program is lowered.
_on_one_device = Primitive("specconv_on_one_device")
_on_one_device.def_impl(lambda array: array)
_on_one_device.def_abstract_eval(lambda array: array)
batching.defvectorized(_on_one_device)


def _refuse_several_devices(context: Any, array: Any) -> list[Any]:
    """Lowers the identity.

    Raises:
      ValueError: the program runs on several devices, and the kernel is not inside a shard_map over all of them.
    """
    axes: Any = context.module_context.axis_context
    count = getattr(axes, "num_devices", None) or 1
    if hasattr(axes, "manual_axes"):  # inside shard_map: the axes that it leaves to the compiler
        left = {name: size for name, size in axes.mesh.shape.items() if name not in axes.manual_axes}
        count = math.prod(left.values())
    if count > 1:
        _raise_not_on_one_device(f"a program on {count} devices")
    return [array]


def _raise_not_on_one_device(got: str) -> NoReturn:
    raise ValueError(
        f"`implementation`: expected a program on one device for the Pallas kernels, got {got}. "
        "The compiler cannot divide a kernel and would gather pool and buffer on every device: call "
        'jax_impl.sharding\'s functions or your own shard_map over all mesh axes, or use "xla".'
    )


mlir.register_lowering(_on_one_device, _refuse_several_devices)


def fresh_like(array: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A fresh array's shape for `call_in_place`; inside shard_map it varies over the mesh axes that `array` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)  # type: ignore


def _new_ref(array: jax.Array, interpret: bool) -> Any:
    # Left open everywhere else, because a scan cannot close over a ref that names a memory space.
    return jax.new_ref(array, memory_space=plgpu.GMEM) if _IS_0_10 and interpret else jax.new_ref(array)


def _interpret_parameters(interpret: bool) -> Any:
    if not interpret:
        return False
    if _IS_0_10:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()
    return plgpu.InterpretGPUParams()


def block_of(conv_dim: int, item_bytes: int, thread_bytes: int) -> tuple[int, int]:
    """Channels of one block and elements of one thread's access.

    Args:
      conv_dim: channels, a multiple of 128.
      item_bytes: bytes of one element, of the widest array if there are several.
      thread_bytes: bytes that one thread should move per run of channels.

    Example:
      >>> block_of(8192, 2, 16), block_of(640, 2, 16), block_of(8192, 2, 4)
      ((1024, 8), (640, 1), (256, 2))
    """
    elements = max(1, thread_bytes // item_bytes)
    units = conv_dim // LANES
    vector = max(v for v in (1, 2, 4, 8) if v <= elements and units % v == 0)
    repeat = max(m for m in range(1, elements // vector + 1) if units // vector % m == 0)
    return LANES * vector * repeat, vector
