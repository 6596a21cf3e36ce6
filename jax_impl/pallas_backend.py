"""The one module that knows Pallas, its GPU backend and the differences between JAX versions.

Kernels run on Mosaic GPU (Hopper and newer) through `pl.kernel` on a `plgpu.Mesh`, which every supported JAX has.
A kernel body reads arrays and refs by index; this module gives it the few words it needs (`grid_index`, `load`, `span`,
`when`) and launches it. In place means: the array is turned into a ref, the kernel writes the ref, and the frozen ref
is the result; on a donated argument under `jit` that is the same buffer.

    JAX 0.10   interpreter parameters are private, its refs want an explicit memory space, `load` takes the index
    JAX 0.11+  public parameters, refs without a memory space, `load` takes a view of the ref
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.layout import ConvCacheSpec

_IS_0_10 = jax.__version_info__ < (0, 11)

MIN_COMPUTE_CAPABILITY = 9.0  # Hopper
LANES = 128  # threads of a block; stores are not masked, so a block covers a multiple of this many channels
VECTOR_BYTES = 16  # widest access of one thread
FULL_GRID = 264  # blocks that keep 132 multiprocessors busy twice over

when = pl.when
span = pl.ds
grid_index = lax.axis_index


def unsupported(spec: ConvCacheSpec) -> str | None:
    """Why the kernels cannot take this geometry, as an error message; None when they can."""
    if spec.conv_dim % LANES:
        return (
            f"`implementation`: expected conv_dim % {LANES} = 0 for the Pallas kernels, got conv_dim = {spec.conv_dim}. "
            'Use "xla", or None to fall back to it.'
        )
    return None


def choose(implementation: str | None, specs: Sequence[ConvCacheSpec]) -> str:
    """The implementation to run: a named one is obeyed or raises, None takes the kernels where they run.

    Raises:
      ValueError: "pallas" or "pallas_interpret" with a geometry the kernels cannot take, or "pallas" without a GPU.
    """
    if implementation == "xla":
        return "xla"
    reasons = [reason for reason in map(unsupported, specs) if reason]
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


def target_platform() -> str:
    """Platform that a program traced now is for: that of the mesh set with `jax.set_mesh`, else of the default device.

    The mesh counts first, because a program can be compiled for a GPU on a machine that has none.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None) or jax.default_backend()


def runs_here() -> bool:
    """Whether the default device is a GPU that the kernels run on."""
    if target_platform() != "gpu" or jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.devices()[0], "compute_capability", "0.0")) >= MIN_COMPUTE_CAPABILITY


def load(ref: Any, index: tuple[Any, ...], shape: tuple[int, ...], vector: int, interpret: bool) -> jax.Array:
    """Reads `ref[index]` into registers, `vector` neighbouring elements a thread.

    The default layout reads 8 bytes a thread; naming the layout is what makes 16-byte reads. The interpreter has no
    layouts.
    """
    if interpret:
        return ref[index]
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=vector)
    if _IS_0_10:
        return plgpu.load(ref, index, layout=layout)
    return plgpu.load(ref.at[index], layout=layout)


def call_in_place(
    body: Callable[..., None],
    inputs: Any,
    outputs: tuple[jax.Array, ...],
    *,
    grid: Mapping[str, int],
    name: str,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Runs `body(inputs, *output_refs)` once per grid point and returns the outputs as the kernel left them.

    Args:
      body: the kernel; `inputs` arrives as the same pytree, of refs.
      inputs: pytree of arrays that the kernel only reads.
      outputs: arrays that the kernel writes where it stores, and that keep their bits elsewhere.
      grid: size of each named axis; the last one is fastest. An empty axis launches nothing.
      name: of the kernel, as profilers show it.
      interpret: run on the CPU.
    """
    if not all(grid.values()):
        return outputs
    refs = tuple(_new_ref(array, interpret) for array in outputs)
    mesh = plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid))
    pl.kernel(body, out_type=(), mesh=mesh, name=name, interpret=_interpret_parameters(interpret))(inputs, *refs)
    return tuple(jax.freeze(ref) for ref in refs)


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


def block_of(conv_dim: int, item_bytes: int, runs: int, thread_bytes: int | None = None) -> tuple[int, int]:
    """Channels of one block and elements of one thread's access, for `runs` runs of conv_dim channels.

    A run is one request of one layer. With many of them, 16 bytes a thread move the most per instruction; with few, 4
    bytes a thread make four times as many blocks, so that all multiprocessors have work.

    Args:
      conv_dim: channels, a multiple of 128.
      item_bytes: bytes of one element.
      runs: runs that one launch covers.
      thread_bytes: bytes of one thread, 4 or 16; None chooses.
    """
    per_thread = conv_dim // LANES * item_bytes
    if thread_bytes is None:
        thread_bytes = VECTOR_BYTES if runs * per_thread >= VECTOR_BYTES * FULL_GRID else 4
    elements = max(1, thread_bytes // item_bytes)
    units = conv_dim // LANES
    vector = max(v for v in (1, 2, 4, 8) if v <= elements and units % v == 0)
    repeat = max(m for m in range(1, elements // vector + 1) if units // vector % m == 0)
    return LANES * vector * repeat, vector
