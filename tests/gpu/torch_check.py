#!/usr/bin/env python3
"""Checks the Python package with PyTorch on a GPU, and times a call.

    python3 tests/gpu/torch_check.py [--out FILE]

PyTorch 2.4 or newer; the library is $SAGEATTN_LIBRARY or what the package finds. Prints a line for each
check and a table of times; exits with 1 if a check failed, 77 without PyTorch or a GPU. --device cpu runs
what needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(77)

import sageattn  # noqa: E402
from sageattn import torch_op  # noqa: E402

Tensor = torch.Tensor
DEVICE = "cuda"
checks: list[tuple[str, bool, Callable[[], str]]] = []


def check(function: Callable[[], str]) -> Callable[[], str]:
    """Register a check for any device."""
    checks.append((function.__name__, False, function))
    return function


def gpu_check(function: Callable[[], str]) -> Callable[[], str]:
    """Register a check that needs a GPU."""
    checks.append((function.__name__, True, function))
    return function


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def tensors(qo: int = 300, kv: int = 300, heads: int = 4, kv_heads: int = 4, dim: int = 64, batch: int = 2,
            dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the layout HND."""
    return tuple(torch.randn(batch, h, n, dim, device=DEVICE, dtype=torch.float32).to(dtype)
                 for h, n in ((heads, qo), (kv_heads, kv), (kv_heads, kv)))  # type: ignore[return-value]


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) in float32, of HND; visible: [qo, kv], True where a query sees a key."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return (torch.softmax(scores, -1) @ v).float(), torch.logsumexp(scores, -1).float()


def bottom_right(qo: int, kv: int) -> Tensor:
    return torch.ones(qo, kv, device=DEVICE, dtype=torch.bool).tril(kv - qo)


def nhd(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def error(out: Tensor, ref: Tensor) -> float:
    return float((out.float() - ref).norm() / ref.norm())


def close(out: Tensor, ref: Tensor, limit: float, what: str) -> float:
    found = error(out, ref)
    expect(found <= limit, f"{what}: relative error {found:.2e} exceeds {limit:.0e}")
    return found


LIMITS = {"auto": 0.08, "sage1": 0.03, "sage2_8b": 0.08, "sage2_4b": 0.25, "sage2pp": 0.08, "exact": 6e-3}


@check
def eager() -> str:
    """Types, layouts, GQA, masks and LSE against attention in float64."""
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        for preset, limit in LIMITS.items():
            if dtype == torch.bfloat16 and preset not in ("auto", "exact"):
                continue  # every pair of type and preset is kernels to compile
            for qo, kv, kv_heads, causal in ((300, 300, 4, False), (129, 300, 2, True), (1, 1000, 1, True)):
                q, k, v = tensors(qo, kv, kv_heads=kv_heads, dtype=dtype)
                ref, ref_lse = reference(q, k, v, bottom_right(qo, kv) if causal else None)
                out, lse = sageattn.attention(q, k, v, layout="HND", causal=causal, preset=preset,
                                              return_lse=True)
                what = f"{dtype} {preset} {qo}x{kv} kv_heads={kv_heads}"
                expect(out.dtype == dtype and out.device == q.device and lse.dtype == torch.float32, what)
                worst = max(worst, close(out, ref, limit, what) / limit)
                slack = 0.5 if preset == "sage2_4b" else 0.1
                expect(float((lse - ref_lse).abs().max()) < slack, f"{what}: lse")
                other = sageattn.attention(nhd(q), nhd(k), nhd(v), causal=causal, preset=preset)
                expect(torch.equal(nhd(other), out), f"{what}: NHD differs from HND")
    return f"largest error {worst:.2f} of its limit"


@check
def masks_and_views() -> str:
    q, k, v = tensors(70, 90)
    i, j = torch.arange(70, device=DEVICE)[:, None], torch.arange(90, device=DEVICE)[None]
    close(sageattn.attention(q, k, v, layout="HND", window=(9, 3)),
          reference(q, k, v, (j - i - 20 >= -9) & (j - i - 20 <= 3))[0], 0.08, "window")
    close(sageattn.attention(q, k, v, layout="HND", mask="top_left"),
          reference(q, k, v, j <= i)[0], 0.08, "top_left")
    fused = torch.randn(2, 80, 3, 4, 64, device=DEVICE).half()
    views = [fused[:, :, n] for n in range(3)]
    expect(torch.equal(sageattn.attention(*views), sageattn.attention(*(x.contiguous() for x in views))),
           "views of a fused projection differ from copies")
    out = torch.empty(2, 90, 4, 64, device=DEVICE, dtype=torch.float32).transpose(1, 2)[:, :, :70]
    expect(sageattn.attention(q, k, v, layout="HND", out=out) is out, "out is not what is returned")
    close(out, reference(q, k, v)[0], 0.08, "out in float32, with strides")
    return ""


@check
def varlen() -> str:
    lengths = [(5, 9), (128, 128), (1, 700), (0, 3), (77, 200)]
    qs, ks, vs = zip(*(tensors(qo, kv, kv_heads=2, batch=1) for qo, kv in lengths))
    packed = [torch.cat([nhd(x)[0] for x in parts]) for parts in (qs, ks, vs)]
    cu_q, cu_kv = (torch.tensor([0, *c], device=DEVICE).cumsum(0).int() for c in zip(*lengths))
    for preset in ("auto", "exact"):
        out, lse = sageattn.attention_varlen(*packed, cu_q, cu_kv, 128, 700, causal=True, return_lse=True,
                                             preset=preset)
        start = 0
        for (qo, kv), q, k, v in zip(lengths, qs, ks, vs):
            if qo:
                ref, ref_lse = reference(q, k, v, bottom_right(qo, kv))
                close(out[start:start + qo].transpose(0, 1)[None], ref, 2 * LIMITS[preset], f"{preset} {qo}x{kv}")
                expect(float((lse[:, start:start + qo] - ref_lse[0]).abs().max()) < 0.2, f"{preset} lse")
            start += qo
    return ""


@check
def sdpa() -> str:
    q, k, v = tensors(50, 80, kv_heads=2)
    ref = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    close(sageattn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), ref, 0.08, "is_causal")
    for kind, options in ((NotImplementedError, {"attn_mask": torch.ones(50, 80, device=DEVICE)}),
                          (NotImplementedError, {"dropout_p": 0.5}), (ValueError, {"enable_gqa": False})):
        refused(kind, lambda: sageattn.scaled_dot_product_attention(q, k, v, **{"enable_gqa": True, **options}))
    return ""


def refused(kind: type[BaseException], call: Callable[[], Any], text: str = "") -> None:
    try:
        call()
    except kind as caught:
        expect(text in str(caught), f"{text!r} is not in {str(caught)!r}")
    else:
        raise AssertionError(f"{kind.__name__} {text!r} was not raised")


@check
def refusals() -> str:
    q, k, v = tensors(8, 8)
    learned = q.clone().requires_grad_()
    refused(ValueError, lambda: sageattn.attention(learned, k, v), "q requires grad")
    refused(ValueError, lambda: torch_op.attention(learned, k, v), "requires grad")
    with torch.no_grad():
        expect(torch.equal(sageattn.attention(learned, k, v), sageattn.attention(q, k, v)), "under no_grad")
    refused(TypeError, lambda: sageattn.attention(q.double(), k, v), "q is of type float64")
    refused(TypeError, lambda: sageattn.attention(q, k, v.bfloat16()), "v is of type bf16; it must be k's, f16")
    refused(ValueError, lambda: sageattn.attention(q.to("meta"), k, v), "q is on device")
    return ""


@gpu_check
def mixed_devices() -> str:
    q, k, v = tensors(8, 8)
    refused(ValueError, lambda: sageattn.attention(q, k.cpu(), v), "k is in host memory; it must be where q is")
    refused(ValueError, lambda: sageattn.attention(q, k, v, out=torch.empty_like(q, device="cpu")), "out is in host")
    refused(ValueError, lambda: sageattn.attention(q.cpu().numpy(), k, v), "k is in CUDA device 0")
    on_cpu = sageattn.Context("cpu")
    refused(ValueError, lambda: sageattn.attention(q, k, v, context=on_cpu), "the plan computes in host memory")
    on_gpu = sageattn.Context("cuda")
    refused(ValueError, lambda: sageattn.attention(q.cpu(), k.cpu(), v.cpu(), context=on_gpu),
            "the plan computes in CUDA device 0")
    refused(ValueError, lambda: sageattn.attention(q, k, v, seqused_kv=torch.ones(2).int()), "seqused_kv is in host")
    return ""


@gpu_check
def streams() -> str:
    """On the current stream, and on one that is given while another is current."""
    q, k, v = tensors(1024, 1024, heads=16, kv_heads=16, dim=128)
    ref = sageattn.attention(q, k, v, layout="HND")
    source, torch_stream = q.clone(), torch.cuda.Stream()
    sageattn.attention(q, k, v, layout="HND", stream=torch_stream)  # allocates the stream's memory
    torch.cuda.synchronize()
    for explicit in (False, True):
        q.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch_stream):
            torch.cuda._sleep(50_000_000)  # what is on another stream would read zeros
            q.copy_(source)
            if not explicit:
                out = sageattn.attention(q, k, v, layout="HND")
        if explicit:
            out = sageattn.attention(q, k, v, layout="HND", stream=torch_stream)
        expect(not torch_stream.query(), "the call waited for the GPU")
        torch.cuda.synchronize()
        expect(torch.equal(out, ref), f"explicit={explicit}: another result than on the default stream")
    with torch.cuda.stream(torch_stream):  # 0 is the legacy default stream, not the current one
        out = sageattn.attention(q, k, v, layout="HND", stream=0)
    torch.cuda.synchronize()
    expect(torch.equal(out, ref), "stream=0")
    return ""


@gpu_check
def graph() -> str:
    """A captured call sees new inputs, and varlen new lengths."""
    q, k, v = tensors(200, 200, kv_heads=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    packed = [nhd(x).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 200, 400], device=DEVICE, dtype=torch.int32)

    def work() -> tuple[Tensor, Tensor]:
        return (sageattn.attention(q, k, v, layout="HND", causal=True),
                sageattn.attention_varlen(*packed, cu, cu, 400, 400))

    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, out_packed = work()
    for cut in (200, 50):
        for tensor in (q, k, v, *packed):
            tensor.normal_()
        cu[1] = cut
        captured.replay()
        torch.cuda.synchronize()
        want, want_packed = work()
        expect(torch.equal(out, want), "replay differs from eager")
        expect(torch.equal(out_packed, want_packed), f"packed replay differs from eager, cut {cut}")
    return ""


def _model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch_op.attention(q * 2, k, v, layout="HND", causal=True, return_lse=True)
    more = torch_op.attention(out, k, v, layout="HND", window=(64, 0), preset="sage1", qk_granularity="per_warp")
    return more + out, lse * 2


@check
def compiled() -> str:
    """torch.compile keeps the operators in one graph; also with CUDA graphs around them."""
    q, k, v = tensors(256, 256)
    want = _model(q, k, v)
    arguments = (q, k, v, "auto", "bottom_right", [], "HND", None, "")
    for operator in (torch.ops.sageattn.attention, torch.ops.sageattn.attention_with_lse):
        torch.library.opcheck(operator.default, arguments,
                              test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
    modes: list[dict[str, str]] = [{"backend": "aot_eager"}]
    if DEVICE == "cuda":
        modes += [{}, {"mode": "reduce-overhead"}]
    for mode in modes:
        torch._dynamo.reset()
        function = torch.compile(_model, fullgraph=True, **mode)
        with torch.no_grad():
            for _ in range(4):  # reduce-overhead warms up, records, then replays
                q, k, v = tensors(256, 256)
                got = [x.clone() for x in function(q, k, v)]
                want = _model(q, k, v)
                for name, a, b in zip(("out", "lse"), got, want):
                    close(a, b.float(), 5e-3, f"{mode} {name}")
    return ", ".join(str(mode) for mode in modes)


@check
def threads() -> str:
    """Eight threads over the plans of the cache, each on a stream of its own."""
    shapes = [tensors(qo, 500, kv_heads=2) for qo in (1, 64, 200)]
    want = [sageattn.attention(*shape, layout="HND", causal=True) for shape in shapes]
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    good: list[bool] = []

    def work() -> None:
        def calls() -> list[bool]:
            return [torch.equal(sageattn.attention(*shape, layout="HND", causal=True), ref)
                    for _ in range(20) for shape, ref in zip(shapes, want)]
        if DEVICE == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                good.extend(calls())
        else:
            good.extend(calls())

    pool = [threading.Thread(target=work) for _ in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    expect(len(good) == 8 * 60 and all(good), f"{good.count(False)} of {len(good)} results differ")
    return ""


class Bare:
    """A tensor of which only one protocol is left."""

    def __init__(self, tensor: Tensor, protocol: str) -> None:
        if protocol == "cuda":
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__
        else:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


@check
def protocols() -> str:
    """__cuda_array_interface__ and DLPack: the workspace comes from the driver."""
    q, k, v = tensors(100, 300)
    want = sageattn.attention(q, k, v, layout="HND")
    names = ["dlpack", *(["cuda"] if DEVICE == "cuda" else [])]
    for name in names:
        for _ in range(20):
            out = torch.zeros_like(want)
            sageattn.attention(*(Bare(x, name) for x in (q, k, v)), layout="HND", out=Bare(out, name))
            expect(torch.equal(out, want), name)
    q, k, v = tensors(100, 300, dtype=torch.bfloat16)
    out = torch.zeros_like(q)
    sageattn.attention(*(Bare(x, "dlpack") for x in (q, k, v)), layout="HND", out=Bare(out, "dlpack"))
    expect(torch.equal(out, sageattn.attention(q, k, v, layout="HND")), "bfloat16 by DLPack")
    if DEVICE == "cuda":
        refused(TypeError, lambda: sageattn.attention(*(Bare(x, "cuda") for x in tensors(4, 4))), "pass out")
        try:
            import cupy
        except ImportError:
            return ", ".join(names) + "; no CuPy"
        q, k, v = tensors(100, 300)
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        torch.cuda.synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            result = sageattn.attention(*arrays, layout="HND")
            stream.synchronize()
        expect(isinstance(result, cupy.ndarray), f"CuPy arrays gave a {type(result).__name__}")
        expect(torch.equal(torch.as_tensor(result, device="cuda"), sageattn.attention(q, k, v, layout="HND")),
               "CuPy")
        names.append("cupy")
    return ", ".join(names)


def microseconds(function: Callable[[], Any], repeat: int = 300) -> float:
    """Median of the host's time in a call; the GPU is drained in between, so nothing waits for it."""
    times: list[float] = []
    for _ in range(repeat):
        if DEVICE == "cuda" and len(times) % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def overheads() -> dict[str, float]:
    """Host time of a call in microseconds, of a decode step that the GPU does in few."""
    q, k, v = tensors(1, 64, batch=1)
    out = torch.empty_like(q)
    context = sageattn.Context(DEVICE)
    dtype = str(q.dtype).rpartition(".")[2]
    plan = sageattn.Plan(context, q_dtype=dtype, head_dim=64, num_qo_heads=4, max_qo_len=1, max_kv_len=64,
                         layout="hnd")
    room = torch.empty(plan.info.preferred_workspace + 256, dtype=torch.uint8, device=DEVICE)
    workspace = room[-room.data_ptr() % plan.info.workspace_alignment:]
    calls: dict[str, Callable[[], Any]] = {
        "sageattn.attention": lambda: sageattn.attention(q, k, v, layout="HND"),
        "sageattn.attention, out given": lambda: sageattn.attention(q, k, v, layout="HND", out=out),
        "Plan.execute, out and workspace given": lambda: plan.execute(q, k, v, out=out, workspace=workspace),
        "torch_op.attention": lambda: torch_op.attention(q, k, v, layout="HND"),
        "torch SDPA": lambda: F.scaled_dot_product_attention(q, k, v)}
    for call in calls.values():
        microseconds(call, 50)
    return {name: round(microseconds(call), 1) for name, call in calls.items()}


def main() -> int:
    global DEVICE
    parser = argparse.ArgumentParser(description="Checks the Python package with PyTorch.")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    DEVICE = args.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU")
        return 77
    torch.manual_seed(3)
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"libsageattn {sageattn.version()}, PyTorch {torch.__version__}, {name}")
    results: dict[str, Any] = {}
    for title, needs_gpu, function in checks:
        if needs_gpu and DEVICE != "cuda":
            continue
        start = time.monotonic()
        try:
            detail, passed = function(), True
        except Exception as caught:  # the others are still worth running
            traceback.print_exc()
            detail, passed = f"{type(caught).__name__}: {caught}", False
        seconds = round(time.monotonic() - start, 1)
        results[title] = {"passed": passed, "detail": detail, "seconds": seconds}
        print(f"{'ok    ' if passed else 'FAILED'}  {title:16} {seconds:6.1f} s  {detail[:200]}", flush=True)
    times = {}
    try:
        times = overheads()
    except Exception as caught:
        traceback.print_exc()
        results["overheads"] = {"passed": False, "detail": str(caught), "seconds": 0.0}
    print("\nhost time of a call                      us")
    for title, value in times.items():
        print(f"{title:38} {value:6.1f}")
    failed = [title for title, result in results.items() if not result["passed"]]
    if args.out is not None:
        args.out.write_text(json.dumps(
            {"version": sageattn.version(), "torch": torch.__version__, "device": name, "checks": results,
             "host_microseconds": times}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(results) - len(failed)} passed, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
