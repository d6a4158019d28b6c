#!/usr/bin/env python3
"""Tests of the Python package (examples/python/sageattn) on the CPU backend.

    test_python.py LIBRARY SCRATCH     needs NumPy, else exit code 77

Results are held to attention in float64 by NumPy. tests/gpu/torch_check.py does the same on a GPU.
"""

import ast
import contextlib
import ctypes
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import unittest
import unittest.mock
import weakref
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "examples" / "python"

try:
    import numpy as np
except ImportError:
    print("skipped: NumPy is not installed")
    sys.exit(77)

os.environ["SAGEATTN_LIBRARY"] = os.path.abspath(sys.argv[1])
SCRATCH = Path(sys.argv[2]).resolve()
sys.path.insert(0, str(PYTHON))
import sageattn  # noqa: E402
from sageattn import _arrays, _core, _functions, _library  # noqa: E402

RNG = np.random.default_rng(7)
ONE_THREAD = sageattn.Context("cpu", num_threads=1)  # small work: threads would only wait


def random(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def inputs(batch=2, qo=19, kv=37, heads=4, kv_heads=2, dim=24, dim_v=40, dtype=np.float32):
    return (random(batch, qo, heads, dim, dtype=dtype), random(batch, kv, kv_heads, dim, dtype=dtype),
            random(batch, kv, kv_heads, dim_v, dtype=dtype))


def reference(q, k, v, visible=None, scale=None):
    """(out, lse) in float64; NHD. visible(i, j): whether query i sees key j."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if visible is not None:
        i, j = np.indices(scores.shape[2:])
        scores = np.where(visible(i, j), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", np.divide(weights, total, where=total > 0, out=weights * 0), v)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + np.where(np.isneginf(top), 0, top))[..., 0]


def hnd(x):
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def exact(q, k, v, **options):
    return sageattn.attention(q, k, v, preset="exact", context=ONE_THREAD, **options)


def relative(out, ref):
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


class Results(unittest.TestCase):
    def close(self, out, ref, limit=1e-6):
        self.assertEqual(out.shape, ref.shape)
        np.testing.assert_allclose(out, ref, rtol=limit, atol=limit)

    def test_masks_layouts_and_lse(self):
        shift = 37 - 19
        masks = [({}, None), ({"causal": True}, lambda i, j: j <= i + shift),
                 ({"mask": "bottom_right"}, lambda i, j: j <= i + shift),
                 ({"mask": "top_left"}, lambda i, j: j <= i),
                 ({"window": (5, 2)}, lambda i, j: (j - i - shift >= -5) & (j - i - shift <= 2)),
                 ({"window": (-1, 0)}, lambda i, j: j <= i + shift)]
        q, k, v = inputs()
        for (options, visible), layout in itertools.product(masks, ("NHD", "HND")):
            with self.subTest(options=options, layout=layout):
                ref, ref_lse = reference(q, k, v, visible)
                arrays = (q, k, v) if layout == "NHD" else map(hnd, (q, k, v))
                out, lse = exact(*arrays, layout=layout, return_lse=True, **options)
                self.close(out if layout == "NHD" else hnd(out), ref)
                self.close(lse, ref_lse)

    def test_scale_and_queries_without_keys(self):
        q, k, v = inputs(qo=9, kv=5)
        ref, ref_lse = reference(q, k, v, lambda i, j: j <= i - 4, 0.3)
        out, lse = exact(q, k, v, sm_scale=0.3, causal=True, return_lse=True)
        self.close(out, ref)
        self.close(lse, ref_lse)
        self.assertTrue(np.isneginf(lse[:, :, :4]).all() and not out[:, :4].any())

    def test_presets(self):
        q, k, v = inputs(batch=1, qo=130, kv=200, dim=64, dim_v=64, dtype=np.float16)
        ref, _ = reference(q, k, v)
        for preset, least, most in (("exact", 0, 5e-4), ("sage1", 1e-4, 0.03), ("sage2_8b", 5e-3, 0.1),
                                    ("sage2pp", 5e-3, 0.1), ("sage2_4b", 3e-2, 0.3), ("auto", 1e-4, 0.1)):
            with self.subTest(preset=preset):
                out = sageattn.attention(q, k, v, preset=preset)
                self.assertEqual(out.dtype, np.float16)
                error = relative(out.astype(np.float64), ref)
                self.assertTrue(least <= error <= most, error)

    def test_numerics_reach_the_plan(self):
        plan = sageattn.Plan(ONE_THREAD, q_dtype="float16", head_dim=64, num_qo_heads=2, max_qo_len=8,
                             max_kv_len=8, preset="sage2_8b", qk_format="i4", smooth_q="on",
                             promotion_interval=64, kernel="mma_sync", sm_scale=0.5)
        info = plan.info
        self.assertEqual((info.qk_format, info.smooth_q, info.promotion_interval, info.kernel, info.sm_scale,
                          info.q_dtype, info.backend, info.head_dim_v, info.origin, info.num_kernels),
                         ("i4", "on", 64, "mma_sync", 0.5, "f16", "cpu", 64, "builtin", 0))
        self.assertEqual(plan.kernels(), [])
        q, k, v = inputs()
        coarse = sageattn.attention(q, k, v, qk_format="i4", context=ONE_THREAD)
        self.assertGreater(relative(coarse, sageattn.attention(q, k, v, context=ONE_THREAD)), 0.01)

    def test_bfloat16_as_integers(self):
        q, k, v = inputs()
        bits = [(np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
        rounded = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
        out = exact(*bits, dtype="bf16")
        self.assertEqual(out.dtype, np.uint16)
        self.close((out.astype(np.uint32) << 16).view(np.float32), reference(*rounded)[0], 8e-3)
        self.close(exact(*bits, dtype="bf16", out_dtype="f32"), reference(*rounded)[0])
        with self.assertRaisesRegex(TypeError, r'q is of type uint16.*dtype="bf16"'):
            exact(*bits)

    def test_varlen(self):
        lengths = [(3, 9), (0, 4), (7, 2), (5, 0), (11, 30)]
        parts = [inputs(1, qo, kv) for qo, kv in lengths]
        packed = [np.concatenate([part[i][0] for part in parts]) for i in range(3)]
        cu = [np.cumsum([0, *column]).astype(np.int32) for column in zip(*lengths)]
        for layout in ("NHD", "HND"):
            arrays = packed if layout == "NHD" else [np.ascontiguousarray(x.swapaxes(0, 1)) for x in packed]
            status = np.full(5, 9, np.int32)
            out, lse = sageattn.attention_varlen(*arrays, *cu, 11, 30, preset="exact", causal=True,
                                                 layout=layout, return_lse=True, status=status,
                                                 context=ONE_THREAD)
            self.assertFalse(status.any())
            out = out if layout == "NHD" else out.swapaxes(0, 1)
            for b, (part, (qo, kv)) in enumerate(zip(parts, lengths)):
                if qo and kv:
                    ref, ref_lse = reference(*part, lambda i, j, s=kv - qo: j <= i + s)
                    self.close(out[cu[0][b]:cu[0][b + 1]], ref[0])
                    self.close(lse[:, cu[0][b]:cu[0][b + 1]], ref_lse[0])
        bad = cu[1].copy()
        bad[1] = -1
        out = sageattn.attention_varlen(*packed, cu[0], bad, 11, 30, preset="exact", status=status)
        self.assertEqual(status.tolist()[0], 1)
        self.assertTrue(np.isnan(out[:3]).all())

    def test_seqused_kv(self):
        q, k, v = inputs()
        out = exact(q, k, v, seqused_kv=np.array([5, 37], np.int32))
        self.close(out[:1], reference(q[:1], k[:1, :5], v[:1, :5])[0])
        self.close(out[1:], reference(q[1:], k[1:], v[1:])[0])

    def test_sdpa(self):
        q, k, v = inputs()
        ref, _ = reference(q, k, v, lambda i, j: j <= i, 0.2)
        out = sageattn.scaled_dot_product_attention(hnd(q), hnd(k), hnd(v), is_causal=True, scale=0.2,
                                                    enable_gqa=True)
        self.assertLess(relative(hnd(out), ref), 0.1)
        with self.assertRaisesRegex(NotImplementedError, "attn_mask"):
            sageattn.scaled_dot_product_attention(q, k, v, np.ones((19, 37)))
        with self.assertRaisesRegex(NotImplementedError, "dropout_p is 0.1"):
            sageattn.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        with self.assertRaisesRegex(ValueError, "query has 4 heads and key 2"):
            sageattn.scaled_dot_product_attention(hnd(q), hnd(k), hnd(v))

    def test_merge(self):
        q, k, v = inputs()
        for layout in ("NHD", "HND"):
            turn = (lambda x: x) if layout == "NHD" else hnd
            left = exact(turn(q), turn(k[:, :8]), turn(v[:, :8]), layout=layout, return_lse=True)
            right = exact(turn(q), turn(k[:, 8:]), turn(v[:, 8:]), layout=layout, return_lse=True)
            out, lse = sageattn.merge(*left, *right, layout=layout)
            ref, ref_lse = reference(q, k, v)
            self.close(turn(out), ref)
            self.close(lse, ref_lse)
        nothing = np.full_like(left[1], -np.inf)
        out, lse = sageattn.merge(left[0] * 0, nothing, *right, layout="HND")
        self.close(out, right[0])
        out, lse = sageattn.merge(left[0] * 0, nothing, left[0] * 0, nothing, layout="HND")
        self.assertTrue(np.isneginf(lse).all() and not out.any())

    def test_compare(self):
        ref = random(2, 5, 3, 8)
        out = ref.copy()
        out[1, 2, 1, 3] += 0.5
        result = sageattn.compare(out, ref)
        self.assertEqual((result.count, result.worst_head, result.nonfinite_out), (240, 4, 0))
        self.assertAlmostEqual(result.max_abs_error, 0.5, 6)
        self.assertEqual(sageattn.compare(hnd(out), hnd(ref), "HND").worst_head, 4)
        with self.assertRaisesRegex(ValueError, "out has shape"):
            sageattn.compare(out[:1], ref)


class Memory(unittest.TestCase):
    """Whatever the strides, results are those of contiguous copies; what is around outputs stays."""

    def same(self, q, k, v, **options):
        np.testing.assert_array_equal(
            exact(q, k, v, **options), exact(*map(np.ascontiguousarray, (q, k, v)), **options))

    def test_views(self):
        q, k, v = inputs()
        self.same(np.asfortranarray(q), np.asfortranarray(k), np.asfortranarray(v))
        self.same(q[:, ::-2], k[::-1], v[..., ::-1])
        self.same(hnd(q).swapaxes(1, 2), hnd(k).swapaxes(1, 2), hnd(v).swapaxes(1, 2))
        self.same(q, np.broadcast_to(k[:, :, :1], (2, 37, 4, 24)), np.broadcast_to(v[:1, :, 1:], (2, 37, 4, 40)))
        fused = random(2, 19, 3, 4, 24)
        self.same(fused[:, :, 0], fused[:, :, 1], fused[:, :, 2])

    def test_all_strides_zero(self):
        """Which the library takes for contiguous."""
        with self.assertRaisesRegex(ValueError, "k has stride 0 in dimension 3 of 24 elements"):
            exact(random(2, 19, 4, 24), np.broadcast_to(np.float32(1), (2, 37, 4, 24)), random(2, 37, 4, 8))
        ones = np.broadcast_to(np.float32(1), (2, 5, 4, 1))
        v = random(2, 5, 4, 1)
        np.testing.assert_array_equal(exact(ones, ones, v), exact(ones.copy(), ones.copy(), v))
        with self.assertRaisesRegex(ValueError, "out has stride 0"):
            base = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 5, 4, 1), (0, 0, 0, 4))
            exact(ones, ones, v, out=base)

    def test_out(self):
        q, k, v = inputs()
        ref = exact(q, k, v)
        room = np.full((2, 19, 4, 80), 7, np.float32)
        out = room[..., ::2]
        self.assertIs(exact(q, k, v, out=out), out)
        np.testing.assert_array_equal(out, ref)
        self.assertTrue((room[..., 1::2] == 7).all())
        half = exact(q, k, v, out=np.empty((2, 19, 4, 40), np.float16))
        np.testing.assert_allclose(half, ref, rtol=1e-3, atol=1e-6)
        frozen = np.empty_like(ref)
        frozen.flags.writeable = False
        with self.assertRaisesRegex(ValueError, "out is read-only"):
            exact(q, k, v, out=frozen)

    def test_empty(self):
        q, k, v = inputs(qo=0)
        self.assertEqual(exact(q, k, v).shape, (2, 0, 4, 40))
        q, k, v = inputs(kv=0)
        out, lse = exact(q, k, v, return_lse=True)
        self.assertTrue(not out.any() and np.isneginf(lse).all())

    def test_dlpack(self):
        class Versioned:
            def __init__(self, array):
                self.array = array

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

        class Old(Versioned):
            def __dlpack__(self):
                return self.array.__dlpack__()

        class Elsewhere(Versioned):
            def __dlpack_device__(self):
                return 10, 0

        q, k, v = inputs()
        ref = exact(q, k, v)
        for kind in (Versioned, Old):
            held = q.copy()
            np.testing.assert_array_equal(exact(kind(held), kind(k[:, ::-1]), kind(v[:, ::-1])), ref)
            out = np.empty_like(ref)
            exact(kind(q), kind(k), kind(v), out=kind(out))
            np.testing.assert_array_equal(out, ref)
            gone = weakref.ref(held)
            del held
            gc.collect()
            self.assertIsNone(gone(), "a capsule keeps the array")
        np.testing.assert_array_equal(exact(Offset(q), k, v), ref)
        with self.assertRaisesRegex(TypeError, "q is of type f32 in 2 lanes"):
            exact(Offset(q, lanes=2), k, v)
        with self.assertRaisesRegex(ValueError, "q is on DLPack device type 10"):
            exact(Elsewhere(q), k, v)
        with self.assertRaisesRegex(TypeError, "q is of type float64; allowed are"):
            exact(Versioned(q.astype(np.float64)), k, v)
        if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # which exports what is read-only
            frozen = np.empty_like(ref)
            frozen.flags.writeable = False
            with self.assertRaisesRegex(ValueError, "out is read-only"):
                exact(q, k, v, out=Versioned(frozen))

    def test_tensors(self):
        """What has data_ptr(), without PyTorch."""
        q, k, v = inputs()
        ref, out = exact(q, k, v), np.empty((2, 19, 4, 40), np.float32)
        exact(Tensor(q), Tensor(k[:, ::-1]), Tensor(v[:, ::-1]), out=Tensor(out))
        np.testing.assert_array_equal(out, ref)
        with self.assertRaisesRegex(ValueError, "k requires grad.*no_grad"):
            exact(Tensor(q), Tensor(k, requires_grad=True), Tensor(v), out=out)
        with self.assertRaisesRegex(ValueError, "v is on device 'meta'"):
            exact(q, k, Tensor(v, device="meta"), out=out)
        with self.assertRaisesRegex(ValueError, "k is in CUDA device 1; it must be where q is, in host memory"):
            exact(Tensor(q), Tensor(k, device="cuda:1"), Tensor(v), out=out)
        with self.assertRaisesRegex(TypeError, "how Tensor makes arrays in host memory; pass out"):
            exact(Tensor(q), Tensor(k), Tensor(v))


class Offset:
    """An array by a DLPack capsule with a byte_offset and without strides, which NumPy never makes."""

    def __init__(self, array, lanes=1):
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._managed = _arrays._DLManaged(_arrays._DLTensor(
            array.__array_interface__["data"][0] - 64, 1, 0, array.ndim, 2, 32, lanes, self._shape, None, 64))

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)


class Tensor:
    """What the package sees of a PyTorch tensor."""

    def __init__(self, array, device="cpu", requires_grad=False, made=None):
        if made is not None:  # notes the stream for which memory is taken
            self.new_empty = lambda shape, dtype: made.append(
                (shape, sys.modules["torch"].cuda.current_stream(1).cuda_stream)) or Tensor(
                    np.empty(shape, dtype), device)
        kind, _, index = device.partition(":")
        self._array = array
        self.shape, self.requires_grad = array.shape, requires_grad
        self.dtype = f"torch.{array.dtype.name}"
        self.device = type("device", (), {"type": kind, "index": int(index) if index else None,
                                          "__repr__": lambda _: device})()

    def data_ptr(self):
        return self._array.__array_interface__["data"][0]

    def stride(self):
        return tuple(stride // self._array.itemsize for stride in self._array.strides)


class FakeTorch:
    """What the package uses of the module; stream 5 is current."""

    float16, float32, uint8 = np.float16, np.float32, np.uint8

    class Stream:
        def __init__(self, cuda_stream, device=None):
            if not cuda_stream:
                raise ValueError("PyTorch makes a stream of its own of 0")
            self.cuda_stream = cuda_stream

    def __init__(self):
        self.cuda, self.made, self.devices, self._current = self, [], set(), [self.Stream(5)]
        self.ExternalStream = self.Stream

    def is_grad_enabled(self):
        return False

    def current_stream(self, device):
        self.devices.add(device)
        return self._current[-1]

    def default_stream(self, device):
        return type("Default", (), {"cuda_stream": 0})

    @contextlib.contextmanager
    def stream(self, stream):
        self._current.append(stream)
        yield
        self._current.pop()


class CudaArray:
    """An array on a GPU; without an address, one that there is no driver to ask about."""

    def __init__(self, *shape, address=0, typestr="<f4"):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": typestr,
                                         "version": 3}


class Cuda(unittest.TestCase):
    """What can be said of arrays on a GPU without one."""

    def adapt(self, name="q", write=False, dtype=None, **fields):
        array = type("Array", (), {})()
        array.dtype = type("dtype", (), {"name": dtype or "float16"})()
        array.__cuda_array_interface__ = {"data": (4096, False), "shape": (2, 3, 4, 8), "typestr": "<f2",
                                          "version": 3, **fields}
        return _arrays.adapt(array, name, write=write)

    def setUp(self):
        self.addCleanup(setattr, _arrays, "_device_of", _arrays._device_of)
        _arrays._device_of = lambda address: 1

    def test_interface(self):
        array = self.adapt()
        self.assertEqual((array.data, array.shape, array.strides, array.dtype, array.device, array.stream),
                         (4096, (2, 3, 4, 8), (96, 32, 8, 1), "f16", 1, None))
        self.assertEqual(self.adapt(strides=(192, -64, 16, 2)).strides, (96, -32, 8, 1))
        self.assertEqual(self.adapt(typestr="<V2", dtype="bfloat16").dtype, "bf16")
        for text, fields in (("q has a mask", {"mask": array}), ("q has a stride of 15 bytes", {
                "strides": (192, 64, 15, 2)}), ("q is read-only", {"data": (4096, True), "write": True})):
            with self.assertRaisesRegex(ValueError, text):
                self.adapt(**fields)

    def test_streams(self):
        class Stream:
            def __init__(self, **fields):
                self.__dict__.update(fields)

        for stream in (7, Stream(cuda_stream=7), Stream(ptr=7), Stream(__cuda_stream__=lambda: (0, 7)),
                       Stream(__cuda_stream__=(0, 7))):
            self.assertEqual(_arrays.stream_handle(stream), 7)
        with self.assertRaisesRegex(TypeError, "stream is a str; allowed are"):
            _arrays.stream_handle("7")
        ready = [self.adapt(stream=number) for number in (7, 8)]
        plain = self.adapt()
        self.assertEqual(_arrays.current_stream((plain, ready[0], ready[0])), 7)
        self.assertEqual(_arrays.current_stream((plain, plain)), 0)
        with self.assertRaisesRegex(ValueError, r"different streams \[7, 8\]"):
            _arrays.current_stream((plain, *ready))

    def plan(self):
        """A plan that thinks it is on device 1, and the (workspace, its size, stream) of its executes."""
        plan, calls = sageattn.Plan(ONE_THREAD, q_dtype="f16", head_dim=8, num_qo_heads=4, max_qo_len=3,
                                    max_kv_len=3, max_batch=2), []
        plan._device = 1
        plan._execute = lambda handle, args, workspace, size, stream, error: calls.append(
            (workspace, size, stream)) or 0
        return plan, calls

    def test_memory_and_streams_of_torch(self):
        """Outputs and workspace come from the pool of the stream that will use them."""
        torch = FakeTorch()
        with unittest.mock.patch.dict(sys.modules, torch=torch):
            self.execute_on_torch(torch)

    def execute_on_torch(self, torch):
        plan, calls = self.plan()
        q = Tensor(np.zeros((2, 3, 4, 8), np.float16), device="cuda:1", made=torch.made)
        lse = Tensor(np.zeros((2, 4, 3), np.float32), device="cuda:1")
        for given, used in ((None, 5), (9, 9), (5, 5), (0, 0), (torch.Stream(9), 9)):
            torch.made.clear()
            plan.execute(q, q, q, lse=lse, stream=given)
            self.assertEqual(calls[-1][2], used or None)
            self.assertEqual(torch.made, [((2, 3, 4, 8), used), ((calls[-1][1],), used)])
        self.assertEqual(torch.devices, {1})

    def test_memory_of_the_driver(self):
        log = []

        class Driver:
            def __getattr__(self, name):
                def function(*arguments):
                    log.append((name, arguments[-1]))
                    if name == "cuMemAllocAsync":
                        arguments[0]._obj.value = 8192
                    return 0
                return function

        self.addCleanup(setattr, _arrays, "_driver", _arrays._driver)
        _arrays._driver = Driver
        self.addCleanup(_arrays._primary_context.cache_clear)
        plan, calls = self.plan()
        array = CudaArray(2, 3, 4, 8, address=4096, typestr="<f2")
        plan.execute(array, array, array, out=CudaArray(2, 3, 4, 8, address=16384, typestr="<f2"), stream=6)
        self.assertEqual((calls[0][0], calls[0][2]), (8192, 6))
        self.assertEqual([name for name, _ in log], ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
                                                     "cuMemAllocAsync", "cuMemFreeAsync", "cuCtxPopCurrent_v2"])
        self.assertEqual((log[0][1], log[2][1], log[3][1]), (1, 6, 6))


class Errors(unittest.TestCase):
    def test_arguments(self):
        q, k, v = inputs()
        wide = q.astype(np.float64)
        cases = [
            (TypeError, "q is of type float64; allowed are float16, bfloat16 and float32", (wide, k, v), {}),
            (TypeError, "q is a list; allowed are NumPy arrays", (q.tolist(), k, v), {}),
            (TypeError, "q is of type float32 of foreign byte order", (q.astype(">f4"), k, v), {}),
            (ValueError, r"q has shape \[19, 4, 24\]; it must be \[batch, tokens, heads, channels\]",
             (q[0], k, v), {}),
            (ValueError, "k has batch 1; it must be q's, 2", (q, k[:1], v), {}),
            (ValueError, "k has 23 channels; it must have q's 24", (q, k[..., 1:], v), {}),
            (ValueError, "v has 36 tokens; it must have k's 37", (q, k, v[:, 1:]), {}),
            (ValueError, "v has 1 heads; it must have k's 2", (q, k, v[:, :, 1:]), {}),
            (ValueError, "q has 3 heads; they must be a multiple of k's 2", (q[:, :, :3], k, v), {}),
            (TypeError, "v is of type f16; it must be k's, f32", (q, k, v.astype(np.float16)), {}),
            (ValueError, "k is in CUDA device 0; it must be where q is", (q, CudaArray(2, 0, 2, 24), v), {}),
            (ValueError, "out is in CUDA device 0", (q, k, v), {"out": CudaArray(0, 19, 4, 40)}),
            (ValueError, r"out has shape \[2, 18, 4, 40\]; it must be \[2, 19, 4, 40\]", (q, k, v),
             {"out": np.empty((2, 18, 4, 40), np.float32)}),
            (TypeError, "unknown argument 'qk_fromat'", (q, k, v), {"qk_fromat": "i8"}),
            (ValueError, "qk_format is 'i9'; allowed are auto, i8, i4", (q, k, v), {"qk_format": "i9"}),
            (TypeError, "smooth_q is True", (q, k, v), {"smooth_q": True}),
            (TypeError, "promotion_interval is '64'; it must be an integer", (q, k, v),
             {"promotion_interval": "64"}),
            (ValueError, "promotion_interval is 4294967360; it must fit in 32 bits", (q, k, v),
             {"promotion_interval": (1 << 32) + 64}),
            (ValueError, "preset is 'sage9'; allowed are auto, sage1", (q, k, v), {"preset": "sage9"}),
            (ValueError, "layout is 'DNH'; allowed are nhd, hnd", (q, k, v), {"layout": "DNH"}),
            (ValueError, "mask is 'causal'; allowed are 'bottom_right'", (q, k, v), {"mask": "causal"}),
            (ValueError, "causal and window are given", (q, k, v), {"causal": True, "window": (1, 1)}),
            (ValueError, "dtype is 'f16'", (q, k, v), {"dtype": "f16"}),
            (ValueError, "stream is 5; it must be None on the CPU", (q, k, v), {"stream": 5}),
            (TypeError, "seqused_kv is of type int64; it must be int32", (q, k, v),
             {"seqused_kv": np.zeros(2, np.int64)}),
            (ValueError, r"seqused_kv has shape \[3\]; it must be \[2\]", (q, k, v),
             {"seqused_kv": np.zeros(3, np.int32)}),
        ]
        for kind, text, arrays, options in cases:
            with self.subTest(text=text), self.assertRaisesRegex(kind, text):
                sageattn.attention(*arrays, context=ONE_THREAD, **options)

    def test_library_errors(self):
        q, k, v = inputs()
        with self.assertRaises(sageattn.InvalidArgumentError) as caught:
            exact(q, k, v, window=(-2, 0))
        self.assertEqual((caught.exception.status, caught.exception.status_name),
                         (100, "SAGEATTN_E_INVALID_ARGUMENT"))
        self.assertIn("window_left = -2", str(caught.exception))
        self.assertIsInstance(caught.exception, ValueError)
        with self.assertRaises(sageattn.UnsupportedError) as caught:
            ONE_THREAD.export_blob()
        self.assertIsInstance(caught.exception, NotImplementedError)
        with self.assertRaises(sageattn.SageAttentionError) as caught:
            sageattn.Context("cuda", device=99)
        self.assertEqual(caught.exception.status_name, "SAGEATTN_E_NO_DEVICE")
        with self.assertRaisesRegex(sageattn.InvalidArgumentError, "103|overlaps"):
            exact(q, q, q, out=q)

    def test_varlen_arguments(self):
        q, k, v = (x[0] for x in inputs())
        cu = np.array([0, 19], np.int32)
        with self.assertRaisesRegex(ValueError, "cu_seqlens_kv has 3 entries and cu_seqlens_q 2"):
            sageattn.attention_varlen(q, k, v, cu, np.array([0, 1, 37], np.int32), 19, 37)
        with self.assertRaisesRegex(ValueError, "cu_seqlens_q has stride 2; its elements must be adjacent"):
            sageattn.attention_varlen(q, k, v, np.zeros(4, np.int32)[::2], cu, 19, 37)
        with self.assertRaisesRegex(TypeError, "need cu_seqlens_q"):
            sageattn.attention_varlen(q, k, v, None, cu, 19, 37)


class Plans(unittest.TestCase):
    def plan(self, **fields):
        return sageattn.Plan(ONE_THREAD, **{
            "q_dtype": "f32", "head_dim": 24, "head_dim_v": 40, "num_qo_heads": 4, "num_kv_heads": 2,
            "max_batch": 2, "max_qo_len": 19, "max_kv_len": 37, "preset": "exact", **fields})

    def test_execute(self):
        q, k, v = inputs()
        lse = np.empty((2, 4, 19), np.float32)
        with self.plan() as plan:
            workspace = np.empty(plan.info.min_workspace + 64, np.uint8)
            aligned = workspace[-workspace.__array_interface__["data"][0] % 64:][:plan.info.min_workspace]
            out = plan.execute(q, k, v, lse=lse, workspace=aligned)
            np.testing.assert_allclose(lse, reference(q, k, v)[1], atol=1e-5)
            np.testing.assert_array_equal(out, exact(q, k, v))
            with self.assertRaises(sageattn.InvalidArgumentError) as caught:
                plan.execute(q, k, v, workspace=aligned[:-64])
            self.assertEqual(caught.exception.status_name, "SAGEATTN_E_WORKSPACE")
            with self.assertRaises(sageattn.InvalidArgumentError) as caught:
                plan.execute(np.tile(q, (1, 2, 1, 1)), k, v)
            self.assertEqual(caught.exception.status_name, "SAGEATTN_E_LIMIT")
            for text, arrays in (("q has heads: 2; the plan takes 4", (q[:, :, :2], k, v)),
                                 ("v has channels: 39; the plan takes 40", (q, k, v[..., 1:])),
                                 ("q is in CUDA device 0; the plan computes in host memory",
                                  (CudaArray(2, 0, 4, 24), CudaArray(2, 0, 2, 24), CudaArray(2, 0, 2, 40)))):
                with self.assertRaisesRegex(ValueError, text):
                    plan.execute(*arrays)
            with self.assertRaisesRegex(TypeError, "q is of type f16; the plan takes f32"):
                plan.execute(q.astype(np.float16), k, v)
            with self.assertRaisesRegex(TypeError, "out is of type f16; the plan writes f32"):
                plan.execute(q, k, v, out=np.empty((2, 19, 4, 40), np.float16))
            with self.assertRaisesRegex(ValueError, r"lse has shape \[2, 19, 4\]; it must be \[2, 4, 19\]"):
                plan.execute(q, k, v, lse=np.empty((2, 19, 4), np.float32))
        with self.assertRaisesRegex(ValueError, "the plan is closed"):
            plan.execute(q, k, v)

    def test_threads(self):
        q, k, v = inputs()
        plan, results = self.plan(preset="sage2_8b"), []
        ref = plan.execute(q, k, v)

        def work():
            for _ in range(30):
                out = plan.execute(q, k, v)
                if not np.array_equal(out, ref):
                    return
            results.append(True)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(results), 8)

    def test_cache(self):
        q, k, v = inputs(batch=1, qo=1, kv=600)
        sageattn.clear_cache()
        for kv in range(1, 600):  # a decode
            exact(q, k[:, :kv], v[:, :kv])
        self.assertLess(len(_functions._cache), 40)
        sageattn.set_plan_cache_size(3)
        self.assertEqual(len(_functions._cache), 3)

        right = []

        def work(dim):
            for _ in range(5):
                out = exact(q[..., :dim], k[..., :dim], v)
                right.append(np.allclose(out, reference(q[..., :dim], k[..., :dim], v)[0], atol=1e-6))

        threads = [threading.Thread(target=work, args=(dim,)) for dim in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertTrue(len(right) == 40 and all(right))
        self.assertEqual(len(_functions._cache), 3)
        sageattn.set_plan_cache_size(_functions.PLAN_CACHE_SIZE)
        with self.assertRaisesRegex(ValueError, "size is 0"):
            sageattn.set_plan_cache_size(0)

    def test_limits_do_not_change_bits(self):
        """Limits are rounded up; the result is that of a plan for these very lengths."""
        q, k, v = inputs(batch=2, qo=19, kv=1037, dim=64, dim_v=64)
        for preset in ("sage1", "sage2_8b", "sage2_4b"):
            plan = self.plan(preset=preset, head_dim=64, head_dim_v=64, max_kv_len=1037)
            np.testing.assert_array_equal(sageattn.attention(q, k, v, preset=preset, context=ONE_THREAD),
                                          plan.execute(q, k, v))

    def test_context(self):
        lines = []

        def log(level, line):
            lines.append((level, line))

        hook = weakref.ref(log)
        with sageattn.Context("cpu", 80, 1, log=log) as context:
            self.assertIn("arch: 80", context.report())
            plan = sageattn.Plan(context, q_dtype="f16", head_dim=64, num_qo_heads=1, max_qo_len=1,
                                 max_kv_len=1)
            context.selftest()
        self.assertTrue(lines and all(level in ("info", "warning") for level, _ in lines))
        with self.assertRaisesRegex(ValueError, "the context is closed"):
            context.report()
        ones = np.ones((1, 1, 1, 64), np.float16)
        self.assertEqual(plan.execute(ones, ones, ones).tolist(), ones.tolist())  # outlives its context
        self.assertEqual(plan.info.arch, 80)
        del log
        gc.collect()
        self.assertIsNotNone(hook(), "the plan's log hook is gone")
        del plan
        gc.collect()
        self.assertIsNone(hook(), "the log hook leaks")

    def test_workspace_of_a_thread(self):
        memory = _core._thread_memory
        with memory.workspace(100) as first, memory.workspace(100) as second:  # as in a signal's handler
            self.assertNotEqual(first, second)
            self.assertEqual(first % 4096, 0)
        with memory.workspace(50) as again:
            self.assertIn(again, (first, second))
        with memory.workspace(_core._KEPT_WORKSPACE + 1):
            pass
        self.assertIsNone(memory.kept, "a large workspace is kept")

    def test_fork(self):
        plan = self.plan()
        q, k, v = inputs()
        ref = sageattn.attention(q, k, v, preset="exact")  # on the threads of a context of the cache
        child = os.fork()
        if child == 0:
            try:
                right = np.array_equal(sageattn.attention(q, k, v, preset="exact"), ref)
                try:
                    plan.execute(q, k, v)
                except RuntimeError as error:
                    right = right and "before a fork" in str(error)
                else:
                    right = False
                del plan
                gc.collect()
                os._exit(0 if right else 1)
            except BaseException:
                os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


def run(*command, cwd=None, **environment):
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, text=True, check=False,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


class Installation(unittest.TestCase):
    PROGRAM = ("import numpy as np, sageattn, threading\n"
               "q = np.ones((1, 3, 2, 8), np.float32)\n"
               "plan = sageattn.Plan(sageattn.Context('cpu'), q_dtype='f32', head_dim=8, num_qo_heads=2,\n"
               "                     max_qo_len=3, max_kv_len=3)\n"
               "thread = threading.Thread(target=lambda: [plan.execute(q, q, q) for _ in range(10**9)],\n"
               "                          daemon=True)\n"
               "thread.start()\n"
               "print(sageattn.attention(q, q, q).sum(), sageattn.__file__)\n")

    def test_exit(self):
        """With plans alive and another thread still computing, a program ends quietly."""
        done = run(sys.executable, "-c", self.PROGRAM, PYTHONPATH=str(PYTHON))
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"\A48\.0 .+/sageattn/__init__\.py\n\Z")

    def test_without_numpy(self):
        program = ("import sys; sys.modules['numpy'] = None\n"
                   "import sageattn\n"
                   "print(sageattn.Context('cpu').report().splitlines()[2])")
        done = run(sys.executable, "-c", program, PYTHONPATH=str(PYTHON))
        self.assertEqual(done.stdout, "backend: CPU (asked for)\n")

    def test_missing_library(self):
        program = "import sageattn; sageattn.version()"
        done = run(sys.executable, "-c", program, PYTHONPATH=str(PYTHON), SAGEATTN_LIBRARY="/nowhere/x.so")
        self.assertRegex(done.stdout, r"ImportError: libsageattn\.so\.0 was not found; SAGEATTN_LIBRARY does not name one.*"
                         r"Tried:\n  /nowhere/x\.so \(\$SAGEATTN_LIBRARY\)")
        done = run(sys.executable, "-c", program, PYTHONPATH=str(PYTHON), SAGEATTN_LIBRARY="libc.so.6")
        self.assertIn("is no libsageattn 0.1: it has no sageattn_version", done.stdout)

    def test_nvrtc_in_wheels(self):
        cache = SCRATCH / "ld.so.cache"
        cache.write_bytes(b"libc.so.6\0")
        program = (f"from sageattn import _library; _library._LOADER_CACHE = type(_library._PACKAGE)({str(cache)!r})\n"
                   "print(_library.nvrtc_in_wheels())")
        folder = SCRATCH / "wheels" / "nvidia" / "cuda_nvrtc" / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        found = folder / "libnvrtc.so.12"
        found.write_bytes(b"")
        path = f"{SCRATCH / 'wheels'}:{PYTHON}"
        wheel = run(sys.executable, "-S", "-c", program, PYTHONPATH=path, SAGEATTN_NVRTC="")
        self.assertEqual(wheel.stdout.strip(), str(found))
        told = run(sys.executable, "-S", "-c", program, PYTHONPATH=path, SAGEATTN_NVRTC="/elsewhere")
        self.assertEqual(told.stdout.strip(), "None")
        loader = run(sys.executable, "-S", "-c", program, PYTHONPATH=path,
                     LD_LIBRARY_PATH=str(folder))
        self.assertEqual(loader.stdout.strip(), "None")
        cache.write_bytes(b"libc.so.6\0libnvrtc.so.12\0")
        system = run(sys.executable, "-S", "-c", program, PYTHONPATH=path)
        self.assertEqual(system.stdout.strip(), "None")

    def test_wheel(self):
        for module in ("pip", "setuptools", "wheel"):
            if importlib.util.find_spec(module) is None:
                self.skipTest(f"{module} is not installed")
        wheels, target = SCRATCH / "dist", SCRATCH / "site"
        source = SCRATCH / "source"  # setuptools writes beside what it builds
        run("rm", "-rf", str(wheels), str(target), str(source))
        source.mkdir(parents=True)
        run("cp", "-r", str(PYTHON / "sageattn"), str(PYTHON / "pyproject.toml"), str(source))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        built = run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels),
                    str(source))
        self.assertEqual(built.returncode, 0, built.stdout)
        [wheel] = wheels.iterdir()
        self.assertEqual(wheel.name, f"sageattn-{sageattn.__version__}-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as file:
            names = {name for name in file.namelist() if ".dist-info/" not in name}
        self.assertEqual(names, {f"sageattn/{path.name}" for path in (PYTHON / "sageattn").iterdir()
                                 if path.is_file()})
        installed = run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel))
        self.assertEqual(installed.returncode, 0, installed.stdout)
        done = run(sys.executable, "-c", self.PROGRAM, cwd=SCRATCH, PYTHONPATH=str(target))
        self.assertEqual(done.stdout, f"48.0 {target}/sageattn/__init__.py\n")

    def test_version(self):
        text = (PYTHON / "pyproject.toml").read_text(encoding="utf-8")
        self.assertIn(f'\nversion = "{sageattn.__version__}"\n', text)
        self.assertTrue(sageattn.version().startswith(f"{sageattn.__version__} ("))
        self.assertEqual(".".join(map(str, _library._abi.VERSION)), sageattn.__version__)

    def test_sources(self):
        """Python 3.9 reads them, and mypy finds nothing."""
        files = sorted((PYTHON / "sageattn").glob("*.py"))
        for file in files:
            ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 9))
        if importlib.util.find_spec("mypy") is None:
            self.skipTest("mypy is not installed")
        # torch_op needs PyTorch to be judged.
        checked = run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(SCRATCH / "mypy"),
                      *(str(file) for file in files if file.name != "torch_op.py"))
        self.assertEqual(checked.returncode, 0, checked.stdout)


if __name__ == "__main__":
    SCRATCH.mkdir(parents=True, exist_ok=True)
    unittest.main(argv=sys.argv[:1], verbosity=1)
