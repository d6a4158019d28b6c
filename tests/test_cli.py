#!/usr/bin/env python3
"""Tests of the `sageattn` program, through its command line alone.

    test_cli.py PROGRAM [unittest arguments]

Attention is recomputed here in plain Python, from the definition.
"""

import array
import csv
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

import accuracy_on_gpu

PROGRAM = ""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESOURCES = os.path.join(ROOT, "tests", "nvrtc", "resources.tsv")

OK, FAILED, USAGE, LIBRARY, FILE = range(5)
DESCRS = {"F16": "<f2", "BF16": "<V2", "F32": "<f4", "F64": "<f8", "U16": "<u2", "I32": "<i4",
          "I64": "<i8"}
SIZES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "U16": 2, "I32": 4, "I64": 8}
CODES = {"F16": "e", "F32": "f", "F64": "d", "U16": "H", "I32": "i", "I64": "q"}

# ---- Tensors: a dtype, a shape, and a flat list of values --------------------------------------


class Tensor:
    def __init__(self, dtype, shape, values):
        self.dtype, self.shape, self.values = dtype, tuple(shape), list(values)
        assert len(self.values) == math.prod(shape)

    def __getitem__(self, index):
        flat = 0
        for i, size in zip(index, self.shape, strict=True):
            flat = flat * size + i
        return self.values[flat]

    def __setitem__(self, index, value):
        flat = 0
        for i, size in zip(index, self.shape, strict=True):
            flat = flat * size + i
        self.values[flat] = value

    def bytes(self):
        if self.dtype == "BF16":
            return struct.pack(f"<{len(self.values)}H", *map(bf16_bits, self.values))
        return struct.pack(f"<{len(self.values)}{CODES[self.dtype]}", *self.values)

    def rounded(self):
        return decode(self.dtype, self.shape, self.bytes())

    def transposed(self):
        """NHD to HND or back."""
        batch, first, second, channels = self.shape
        return Tensor(self.dtype, (batch, second, first, channels),
                      [self[b, i, j, c] for b in range(batch) for j in range(second)
                       for i in range(first) for c in range(channels)])

    def item(self, batch):
        """One batch item, still with a batch axis."""
        size = len(self.values) // self.shape[0]
        return Tensor(self.dtype, (1, *self.shape[1:]),
                      self.values[batch * size:(batch + 1) * size])

    def reshaped(self, shape):
        return Tensor(self.dtype, shape, self.values)


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def decode(dtype, shape, data):
    count = math.prod(shape)
    if dtype == "BF16":
        halves = struct.unpack(f"<{count}H", data)
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(h << 16 for h in halves)))
    else:
        values = struct.unpack(f"<{count}{CODES[dtype]}", data)
    return Tensor(dtype, shape, values)


def noise(seed, shape, dtype="F32"):
    generator = random.Random(seed)
    values = [generator.gauss(0, 1) for _ in range(math.prod(shape))]
    return Tensor(dtype, shape, values).rounded()


# ---- Files -------------------------------------------------------------------------------------


def npy_bytes(tensor, descr=None, version=1, fortran=False):
    header = repr({"descr": descr or DESCRS[tensor.dtype], "fortran_order": fortran,
                   "shape": tensor.shape}).encode()
    length_size = 2 if version == 1 else 4
    padding = -(8 + length_size + len(header) + 1) % 64
    header += b" " * padding + b"\n"
    return (b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(length_size, "little")
            + header + tensor.bytes())


def parse_npy(data):
    assert data[:8] == b"\x93NUMPY\x01\x00"
    end = 10 + int.from_bytes(data[8:10], "little")
    assert end % 64 == 0 and data[end - 1:end] == b"\n"
    header = eval(data[10:end].decode(), {"__builtins__": {}})
    assert set(header) == {"descr", "fortran_order", "shape"} and header["fortran_order"] is False
    dtype = next(name for name, descr in DESCRS.items() if descr == header["descr"])
    return decode(dtype, header["shape"], data[end:])


def safetensors_bytes(tensors, metadata=None):
    header = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        encoded = tensor.bytes()
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape,
                        "data_offsets": [len(data), len(data) + len(encoded)]}
        data += encoded
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


# ---- Attention by definition -------------------------------------------------------------------


def attention(q, k, v, causal=False, sm_scale=None, kv_lens=None):
    """Output and log-sum-exp, [batch, token, head, channel] and [batch, head, token]."""
    batch, qo_len, heads, dim = q.shape
    kv_heads, dim_v = k.shape[2], v.shape[3]
    scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    out = Tensor("F32", (batch, qo_len, heads, dim_v), [0.0] * (batch * qo_len * heads * dim_v))
    lse = Tensor("F32", (batch, heads, qo_len), [-math.inf] * (batch * heads * qo_len))
    for b in range(batch):
        kv_len = kv_lens[b] if kv_lens else k.shape[1]
        for h in range(heads):
            kv_head = h * kv_heads // heads
            for i in range(qo_len):
                keys = range(min(kv_len, max(0, i + kv_len - qo_len + 1)) if causal else kv_len)
                if not keys:
                    continue
                scores = [scale * sum(q[b, i, h, c] * k[b, j, kv_head, c] for c in range(dim))
                          for j in keys]
                largest = max(scores)
                weights = [math.exp(score - largest) for score in scores]
                total = sum(weights)
                lse[b, h, i] = largest + math.log(total)
                for c in range(dim_v):
                    out[b, i, h, c] = sum(
                        w * v[b, j, kv_head, c] for j, w in zip(keys, weights)) / total
    return out, lse


def relative_error(out, ref):
    difference = sum((a - b) ** 2 for a, b in zip(out.values, ref.values, strict=True))
    return math.sqrt(difference / sum(b * b for b in ref.values))


# ---- Tests -------------------------------------------------------------------------------------


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(npy_bytes(content) if isinstance(content, Tensor) else content)
        return self.path(name)

    def read(self, name):
        with open(self.path(name), "rb") as file:
            return parse_npy(file.read())

    def call(self, *arguments, code=OK, cwd=None):
        """stdout and stderr of a command that must end with `code`."""
        done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                              check=False, cwd=cwd or self.folder.name)
        self.assertEqual(done.returncode, code, f"{arguments}\n{done.stdout}{done.stderr}")
        if code in (USAGE, LIBRARY, FILE):
            self.assertEqual(done.stdout, "")
            self.assertRegex(done.stderr, r"(?m)^sageattn: error: ")
        return done.stdout, done.stderr

    def call_json(self, *arguments, **options):
        return json.loads(self.call(*arguments, "--json", **options)[0])

    def fake_device(self, **variables):
        folder = os.environ.get("SAGEATTN_TEST_FAKES")
        if folder is None:
            self.skipTest("SAGEATTN_TEST_FAKES does not say where the fake driver is")
        environment = unittest.mock.patch.dict(
            os.environ, LD_LIBRARY_PATH=folder, SAGEATTN_NVRTC=f"{folder}/libfake_nvrtc.so",
            SAGEATTN_CACHE_DIR=self.path("cache"), **variables)
        environment.start()
        self.addCleanup(environment.stop)

    def write_qkv(self, q, k, v):
        files = [self.write(f"{name}.npy", tensor) for name, tensor in
                 (("q", q), ("k", k), ("v", v))]
        return ["--q", files[0], "--k", files[1], "--v", files[2]]

    def attend(self, q, k, v, *flags):
        self.call("run", *self.write_qkv(q, k, v), "--out", self.path("out.npy"), *flags)
        return self.read("out.npy")

    def assert_close(self, out, ref, limit):
        self.assertEqual(out.shape, ref.shape)
        self.assertLess(relative_error(out, ref), limit)

    def assert_same_bits(self, one, other):
        self.assertEqual(one.bytes(), other.bytes())


class Files(CliTest):
    def one_key(self, dtype):
        """Attention to a single key returns that key's value, bit for bit."""
        return noise(1, (1, 3, 2, 8), dtype), noise(2, (1, 1, 2, 8), dtype), noise(
            3, (1, 1, 2, 8), dtype)

    def assert_returns_v(self, out, v):
        self.assertEqual(out.values, v.values * out.shape[1])

    def test_round_trip(self):
        for dtype in ("F16", "BF16", "F32"):
            with self.subTest(dtype):
                q, k, v = self.one_key(dtype)
                out = self.attend(q, k, v, "--preset", "exact")
                self.assertEqual((out.dtype, out.shape), (dtype, q.shape))
                self.assert_returns_v(out, v)

    def test_float64_is_read_as_float32_with_a_note(self):
        q, k, v = self.one_key("F64")
        _, stderr = self.call("run", *self.write_qkv(q, k, v), "--out", "out.npy",
                              "--preset=exact")
        self.assertEqual(stderr.count("note:"), 3)
        out = self.read("out.npy")
        self.assertEqual(out.dtype, "F32")
        self.assert_returns_v(out, Tensor("F32", v.shape, v.values).rounded())

    def test_bf16_as_uint16(self):
        q, k, v = self.one_key("BF16")
        as_bits = [decode("U16", t.shape, t.bytes()) for t in (q, k, v)]
        flags = [*self.write_qkv(*as_bits), "--out", "out.npy", "--preset=exact"]
        _, stderr = self.call("run", *flags, code=FILE)
        self.assertIn("--bf16", stderr)
        self.call("run", *flags, "--bf16")
        out = self.read("out.npy")
        self.assertEqual(out.dtype, "U16")
        self.assert_returns_v(out, as_bits[2])

    def test_npy_variants(self):
        tensor = noise(1, (2, 3, 4), "BF16")
        self.write("reference.npy", tensor)
        self.write("variant.npy", npy_bytes(tensor, descr="|V2", version=2))
        result = self.call_json("compare", "variant.npy", "reference.npy")
        self.assertEqual((result["count"], result["rel_error"]), (24, 0))

    def test_safetensors(self):
        tensors = {name: noise(seed, (1, 5, 2, 8), dtype) for seed, (name, dtype) in
                   enumerate({"a": "F16", "b": "BF16", "c": "F32", "d": "F64"}.items())}
        self.write("all.safetensors", safetensors_bytes(tensors, {"model": "none"}))
        for name, tensor in tensors.items():
            with self.subTest(name):
                self.write("same.npy", tensor)
                result = self.call_json("compare", f"all.safetensors:{name}", "same.npy")
                self.assertEqual((result["count"], result["rel_error"]), (80, 0))
        _, stderr = self.call("compare", "all.safetensors:e", "same.npy", code=FILE)
        self.assertIn("holds no tensor 'e'; it holds: a b c d", stderr)
        self.call("compare", "all.safetensors", "same.npy", code=FILE)
        self.write("one.safetensors", safetensors_bytes({"only": tensors["d"]}))
        self.call("compare", "one.safetensors", "same.npy", "--max-rel-error=0")

    def test_bad_files(self):
        good = npy_bytes(noise(1, (1, 2, 2, 4)))
        bad_scale = safetensors_bytes({"a": noise(1, (2, 2))}).replace(b"[2, 2]", b"[2, 3]")
        cases = {
            "text.npy": (b"hello", "not a .npy"),
            "empty.npy": (b"", "not a .npy"),
            "short.npy": (good[:-1], "does not fit"),
            "long.npy": (good + b"\0", "does not fit"),
            "header.npy": (good[:40], "truncated"),
            "fortran.npy": (npy_bytes(noise(1, (2, 2)), fortran=True), "Fortran"),
            "big_endian.npy": (npy_bytes(noise(1, (2, 2)), descr=">f4"), "'>f4'"),
            "integer.npy": (npy_bytes(Tensor("I32", (4,), range(4))), "holds I32"),
            "huge.npy": (good.replace(b"(1, 2, 2, 4)", b"(1, 2, 2, 4" + b"0" * 20 + b")"),
                         "npy"),
            "flat.npy": (npy_bytes(noise(1, (4,))), "has shape [4]"),
            "empty.safetensors": (b"", "not a .safetensors"),
            "header.safetensors": ((10 ** 18).to_bytes(8, "little"), "truncated"),
            "json.safetensors": ((2).to_bytes(8, "little") + b"{]", "malformed"),
            "list.safetensors": ((2).to_bytes(8, "little") + b"[]", ""),
            "shape.safetensors": (bad_scale, "does not fit"),
            "cut.safetensors": (safetensors_bytes({"a": noise(1, (2, 2))})[:-1], "outside"),
        }
        for name, (content, message) in cases.items():
            with self.subTest(name):
                self.write(name, content)
                _, stderr = self.call("compare", name, name, code=FILE)
                self.assertIn(message, stderr)
                self.assertIn(name, stderr)

    def test_missing_and_unwritable_files(self):
        _, stderr = self.call("compare", "nowhere.npy", "nowhere.npy", code=FILE)
        self.assertIn("nowhere.npy: No such file or directory", stderr)
        qkv = self.write_qkv(*self.one_key("F32"))
        _, stderr = self.call("run", *qkv, "--out", "no_folder/out.npy", code=FILE)
        self.assertIn("no_folder/out.npy: cannot be written", stderr)

    def test_a_folder_is_not_a_regular_file(self):
        for name in ("folder.npy", "folder.safetensors"):
            os.mkdir(self.path(name))
            _, stderr = self.call("compare", name, name, code=FILE)
            self.assertIn(f"{name}: is not a regular file", stderr)

    def test_out_and_lse_must_differ(self):
        qkv = self.write_qkv(*self.one_key("F32"))
        for lse in ("out.npy", "./out.npy", self.path("out.npy")):
            with self.subTest(lse):
                _, stderr = self.call("run", *qkv, "--out=out.npy", f"--lse={lse}", code=USAGE)
                self.assertIn("--lse: names the same file as --out", stderr)
                self.assertFalse(os.path.exists(self.path("out.npy")))

    def test_out_and_lse_are_written_both_or_neither(self):
        qkv = self.write_qkv(*self.one_key("F32"))
        run = ["run", *qkv, "--out=out.npy"]
        for lse in (".", "no_folder/lse.npy", "q.npy/lse.npy"):
            with self.subTest(lse):
                self.write("out.npy", b"kept")  # nothing is computed, nothing touched
                _, stderr = self.call(*run, f"--lse={lse}", code=FILE)
                self.assertIn(f"{lse}: cannot be written: ", stderr)
                with open(self.path("out.npy"), "rb") as file:
                    self.assertEqual(file.read(), b"kept")
        if os.path.exists("/dev/full"):  # opens, but cannot be written
            _, stderr = self.call(*run, "--lse=/dev/full", code=FILE)
            self.assertIn("/dev/full: cannot be written: ", stderr)
            self.assertFalse(os.path.exists(self.path("out.npy")))
            self.assertTrue(os.path.exists("/dev/full"))


class Run(CliTest):
    def test_exact(self):
        q, k, v = noise(1, (2, 5, 4, 8)), noise(2, (2, 7, 2, 8)), noise(3, (2, 7, 2, 12))
        for flags, options in (([], {}),
                               (["--mask=causal_bottom_right"], {"causal": True}),
                               (["--sm-scale=-0.3"], {"sm_scale": -0.3}),
                               (["--sm-scale", "-0.3"], {"sm_scale": -0.3})):
            with self.subTest(flags=flags):
                out = self.attend(q, k, v, "--preset=exact", "--lse", "lse.npy", *flags)
                expected_out, expected_lse = attention(q, k, v, **options)
                self.assert_close(out, expected_out, 1e-6)
                self.assert_close(self.read("lse.npy"), expected_lse, 1e-6)

    def test_presets(self):
        q, k, v = noise(1, (1, 20, 2, 16)), noise(2, (1, 30, 1, 16)), noise(3, (1, 30, 1, 16))
        expected_out, expected_lse = attention(q, k, v)
        for preset, limit in (("auto", 0.06), ("sage1", 0.02), ("SAGE2_8B", 0.06),
                              ("sage2_4b", 0.2), ("sage2pp", 0.06), ("exact", 1e-6)):
            with self.subTest(preset):
                out = self.attend(q, k, v, "--preset", preset, "--lse", "lse.npy")
                self.assert_close(out, expected_out, limit)
                self.assert_close(self.read("lse.npy"), expected_lse, limit)

    def test_layouts(self):
        q, k, v = noise(1, (2, 9, 4, 16)), noise(2, (2, 11, 2, 16)), noise(3, (2, 11, 2, 16))
        nhd = self.attend(q, k, v)
        hnd = self.attend(q.transposed(), k.transposed(), v.transposed(), "--layout=hnd")
        self.assert_same_bits(nhd, hnd.transposed())

    def test_three_dimensions_are_a_batch_of_one(self):
        q, k, v = noise(1, (1, 9, 4, 16)), noise(2, (1, 11, 2, 16)), noise(3, (1, 11, 2, 16))
        four = self.attend(q, k, v, "--lse=lse4.npy")
        three = self.attend(*(t.reshaped(t.shape[1:]) for t in (q, k, v)), "--lse=lse3.npy")
        self.assertEqual(three.shape, q.shape[1:])
        self.assertEqual(self.read("lse3.npy").shape, (4, 9))
        self.assert_same_bits(four, three)
        self.assert_same_bits(self.read("lse4.npy"), self.read("lse3.npy"))

    def test_varlen(self):
        lengths = ((4, 6), (0, 3), (5, 5))
        self.write("cu_q.npy", Tensor("I32", (4,), (0, 4, 4, 9)))
        self.write("cu_kv.npy", Tensor("I64", (4,), (0, 6, 9, 14)))
        q, k, v = noise(1, (9, 4, 16)), noise(2, (14, 2, 16)), noise(3, (14, 2, 16))
        packed = self.attend(q, k, v, "--mask=causal_bottom_right", "--lse=lse.npy",
                             "--cu-seqlens-q=cu_q.npy", "--cu-seqlens-kv=cu_kv.npy")
        self.assertEqual(packed.shape, q.shape)
        self.assertEqual(self.read("lse.npy").shape, (4, 9))
        alone, q_start, kv_start = [], 0, 0
        for qo_len, kv_len in lengths:
            pieces = [Tensor("F32", (1, length, *t.shape[1:]),
                             t.values[start * t.shape[1] * 16:][:length * t.shape[1] * 16])
                      for t, start, length in ((q, q_start, qo_len), (k, kv_start, kv_len),
                                               (v, kv_start, kv_len))]
            alone += self.attend(*pieces, "--mask=causal_bottom_right").values
            q_start, kv_start = q_start + qo_len, kv_start + kv_len
        self.assert_same_bits(packed, Tensor("F32", q.shape, alone))

    def test_varlen_with_bad_lengths(self):
        qkv = self.write_qkv(*(noise(seed, (6, 1, 8)) for seed in range(3)))
        self.write("cu.npy", Tensor("I32", (3,), (0, 9, 6)))
        self.write("longer.npy", Tensor("I32", (4,), (0, 2, 4, 6)))
        run = ["run", *qkv, "--out=out.npy"]
        _, stderr = self.call(*run, "--cu-seqlens-q=cu.npy", "--cu-seqlens-kv=cu.npy", code=FILE)
        self.assertIn("sequence 0", stderr)
        self.assertFalse(os.path.exists(self.path("out.npy")))
        _, stderr = self.call(*run, "--cu-seqlens-q=cu.npy", "--cu-seqlens-kv=longer.npy",
                              code=FILE)
        self.assertIn("3 entries but cu_seqlens_kv 4", stderr)
        for entries in ((), (0,)):
            self.write("few.npy", Tensor("I32", (len(entries),), entries))
            _, stderr = self.call(*run, "--cu-seqlens-q=few.npy", "--cu-seqlens-kv=few.npy",
                                  code=FILE)
            self.assertIn(f"few.npy: cu_seqlens needs at least 2 entries, where a sequence starts "
                          f"and where it ends, but has {len(entries)}\n", stderr)
        self.assertFalse(os.path.exists(self.path("out.npy")))

    def test_varlen_warns_of_uncovered_tokens(self):
        qkv = self.write_qkv(*(noise(seed, (6, 1, 8)) for seed in range(3)))
        self.write("part.npy", Tensor("I32", (2,), (0, 4)))
        self.write("all.npy", Tensor("I32", (2,), (0, 6)))
        _, stderr = self.call("run", *qkv, "--out=out.npy", "--cu-seqlens-q=part.npy",
                              "--cu-seqlens-kv=all.npy")
        self.assertEqual(stderr, "sageattn: warning: part.npy: 2 of 6 tokens belong to no "
                                 "sequence\n")

    def test_seqused_kv(self):
        q, k, v = noise(1, (2, 5, 2, 8)), noise(2, (2, 7, 2, 8)), noise(3, (2, 7, 2, 8))
        self.write("used.npy", Tensor("I32", (2,), (7, 3)))
        out = self.attend(q, k, v, "--preset=exact", "--seqused-kv=used.npy")
        self.assert_close(out, attention(q, k, v, kv_lens=(7, 3))[0], 1e-6)
        self.write("used.npy", Tensor("I32", (1,), (7,)))
        _, stderr = self.call("run", *self.write_qkv(q, k, v), "--out=out.npy",
                              "--seqused-kv=used.npy", code=FILE)
        self.assertIn("seqused_kv has 1 entries for 2 sequences", stderr)

    def test_empty(self):
        q, k, v = noise(1, (2, 3, 2, 8)), noise(2, (2, 0, 2, 8)), noise(3, (2, 0, 2, 8))
        self.assertEqual(set(self.attend(q, k, v).values), {0.0})
        q, k, v = noise(1, (2, 0, 2, 8)), noise(2, (2, 3, 2, 8)), noise(3, (2, 3, 2, 8))
        self.assertEqual(self.attend(q, k, v, "--lse=lse.npy").shape, q.shape)
        self.assertEqual(self.read("lse.npy").shape, (2, 2, 0))

    def test_large_work_gives_the_same_bits(self):
        """Both batch items are cut into one execute a kv head; each alone is not."""
        shapes = (2, 4096, 4, 16), (2, 2048, 2, 16), (2, 2048, 2, 16)
        pattern = [array.array("f", noise(seed, (4099,)).values) for seed in range(3)]
        q, k, v = (Tensor("F32", shape, (values * (math.prod(shape) // 4099 + 1))[
            :math.prod(shape)]) for shape, values in zip(shapes, pattern, strict=True))
        whole = self.attend(q, k, v, "--lse=lse.npy")
        lse = self.read("lse.npy")
        for batch in range(2):
            with self.subTest(batch=batch):
                alone = self.attend(q.item(batch), k.item(batch), v.item(batch),
                                    "--lse=lse_alone.npy")
                self.assert_same_bits(whole.item(batch), alone)
                self.assertEqual(lse.shape, (2, 4, 4096))
                size = 4 * 4096
                self.assertEqual(lse.values[batch * size:(batch + 1) * size],
                                 self.read("lse_alone.npy").values)

    def test_json_shows_the_resolved_plan(self):
        qkv = self.write_qkv(*(noise(seed, (1, 4, 1, 8)) for seed in range(3)))
        settings = {"qk_format": "i4", "qk_granularity": "per_token", "smooth_q": "off",
                    "smooth_k": "on", "smooth_v": "sequence", "v_scale": "channel",
                    "rotation": "hadamard", "pv_format": "e4m3", "row_sum": "p",
                    "pv_accum": "two_level", "promotion_interval": 64, "kernel": "mma_sync",
                    "pv_model": "qmma13", "out_dtype": "bf16"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        result = self.call_json("run", *qkv, "--out=out.npy", "--lse=lse.npy", "--arch=89",
                                "--threads=2", "--backend=cpu", *flags)
        self.assertEqual((result["out"], result["lse"]), ("out.npy", "lse.npy"))
        self.assertEqual(result["shape"], [1, 4, 1, 8])
        self.assertGreaterEqual(result["ms"], 0)
        self.assertEqual({name: result["plan"][name] for name in settings}, settings)
        self.assertEqual((result["plan"]["arch"], result["plan"]["backend"]), (89, "cpu"))
        self.assertEqual(self.read("out.npy").dtype, "BF16")

    def test_text(self):
        qkv = self.write_qkv(*(noise(seed, (1, 4, 1, 8)) for seed in range(3)))
        stdout, stderr = self.call("run", *qkv, "--out=out.npy", "--preset=sage2_4b")
        self.assertIn("out: out.npy [1, 4, 1, 8]\n", stdout)
        self.assertIn("qk_format: i4\n", stdout)
        self.assertEqual(stderr, "")


class RunOnDevice(CliTest):
    def setUp(self):
        super().setUp()
        self.qkv = self.write_qkv(noise(1, (1, 300, 4, 64), "F16"), noise(2, (1, 420, 2, 64), "F16"),
                                  noise(3, (1, 420, 2, 64), "F16"))
        self.write("cu_q.npy", Tensor("I32", (3,), (0, 100, 300)))
        self.write("cu_kv.npy", Tensor("I32", (3,), (0, 200, 420)))
        self.write("used.npy", Tensor("I32", (2,), (150, 220)))

    def run_on(self, backend, *flags, **options):
        return self.call("run", *self.qkv, "--preset=sage1", "--out=out.npy", "--lse=lse.npy",
                         "--backend", backend, *flags, **options)

    def test_as_on_the_cpu(self):
        for flags in ((), ("--mask=causal_bottom_right",),
                      ("--cu-seqlens-q=cu_q.npy", "--cu-seqlens-kv=cu_kv.npy",
                       "--seqused-kv=used.npy")):
            with self.subTest(flags=flags):
                self.run_on("cpu", "--arch=80", *flags)
                out, lse = self.read("out.npy"), self.read("lse.npy")
                done = subprocess.run([PROGRAM, "run", *self.qkv, "--preset=sage1", "--out=out.npy",
                                       "--lse=lse.npy", "--backend=cuda", *flags],
                                      capture_output=True, text=True, check=False,
                                      cwd=self.folder.name)
                if "SAGEATTN_E_NO_DEVICE" in done.stderr:
                    self.assertEqual(done.returncode, LIBRARY)
                    self.skipTest("no GPU")
                self.assertEqual(done.returncode, OK, done.stderr)
                self.assert_close(self.read("out.npy"), out, 2e-3)
                self.assert_close(self.read("lse.npy"), lse, 1e-4)

    def test_a_device_that_computes_nothing(self):
        self.fake_device()
        result = json.loads(self.run_on("cuda", "--json")[0])
        self.assertEqual(result["plan"]["backend"], "cuda")
        self.assertEqual(result["plan"]["kernel_name"], "attn_sm80_i8_f16")
        for file, shape in (("out.npy", (1, 300, 4, 64)), ("lse.npy", (1, 4, 300))):
            tensor = self.read(file)
            self.assertEqual(tensor.shape, shape)
            self.assertEqual(set(tensor.values), {0})  # as uploaded

    def test_a_device_that_is_full(self):
        for allocations in range(10):
            self.fake_device(FAKE_CUDA_MEMORY=str(allocations))
            with self.subTest(allocations=allocations):
                _, stderr = self.run_on("cuda", code=LIBRARY)
                self.assertIn("SAGEATTN_E_OUT_OF_MEMORY", stderr)
                self.assertFalse(os.path.exists(self.path("out.npy")))

    def test_a_device_that_is_not_there(self):
        self.fake_device()
        _, stderr = self.run_on("cuda", "--device=2", code=LIBRARY)
        self.assertIn("SAGEATTN_E_NO_DEVICE", stderr)


class Compare(CliTest):
    def setUp(self):
        super().setUp()
        self.ref = noise(1, (2, 6, 3, 4))
        self.out = Tensor("F32", self.ref.shape, [1.01 * x for x in self.ref.values]).rounded()
        self.write("out.npy", self.out)
        self.write("ref.npy", self.ref)

    def test_metrics(self):
        result = self.call_json("compare", "out.npy", "ref.npy")
        self.assertEqual(set(result), {
            "count", "nonfinite_out", "nonfinite_ref", "cos_sim", "rel_l1", "rmse", "rel_error",
            "max_abs_error", "worst_head", "worst_cos_sim", "worst_rel_l1", "worst_rmse",
            "worst_rel_error", "within_limit"})
        self.assertEqual((result["count"], result["nonfinite_out"], result["within_limit"]),
                         (144, 0, None))
        self.assertAlmostEqual(result["cos_sim"], 1, 6)
        self.assertAlmostEqual(result["rel_l1"], 0.01, 6)
        self.assertAlmostEqual(result["rel_error"], 0.01, 6)
        rmse = math.sqrt(sum((0.01 * x) ** 2 for x in self.ref.values) / 144)
        self.assertAlmostEqual(result["rmse"], rmse, 6)

    def test_worst_head(self):
        for token in range(6):
            for channel in range(4):
                self.out[1, token, 2, channel] *= -1
        self.write("out.npy", self.out)
        self.assertEqual(self.call_json("compare", "out.npy", "ref.npy")["worst_head"], 5)
        stdout, _ = self.call("compare", "out.npy", "ref.npy")
        self.assertIn("worst head by CosSim: batch 1, head 2\n", stdout)
        for name, tensor in (("out.npy", self.out), ("ref.npy", self.ref)):
            self.write(name, tensor.transposed())
        result = self.call_json("compare", "out.npy", "ref.npy", "--layout", "hnd")
        self.assertEqual(result["worst_head"], 5)

    def test_limit(self):
        result = self.call_json("compare", "out.npy", "ref.npy", "--max-rel-error=0.0101")
        self.assertIs(result["within_limit"], True)
        result = self.call_json("compare", "out.npy", "ref.npy", "--max-rel-error=0.0099",
                                code=FAILED)
        self.assertIs(result["within_limit"], False)
        _, stderr = self.call("compare", "out.npy", "ref.npy", "--max-rel-error=0.0099",
                              code=FAILED)
        self.assertIn("above the limit", stderr)
        for limit in ("nan", "-1", "-inf", "small"):
            with self.subTest(limit):
                _, stderr = self.call("compare", "out.npy", "ref.npy",
                                      f"--max-rel-error={limit}", code=USAGE)
                self.assertIn("--max-rel-error", stderr)

    def test_elements_that_are_not_finite(self):
        self.out[0, 0, 0, 0] = math.nan
        self.out[0, 0, 0, 1] = math.inf
        self.write("out.npy", self.out)
        result = self.call_json("compare", "out.npy", "ref.npy")
        self.assertEqual((result["nonfinite_out"], result["nonfinite_ref"]), (2, 0))
        self.call("compare", "out.npy", "ref.npy", "--max-rel-error=1", code=FAILED)

    def test_an_infinite_error_is_null_in_json(self):
        self.write("zeros.npy", Tensor("F32", self.ref.shape, [0.0] * 144))
        result = self.call_json("compare", "out.npy", "zeros.npy", "--max-rel-error=1",
                                code=FAILED)
        self.assertIsNone(result["rel_error"])
        self.assertIs(result["within_limit"], False)

    def test_dtypes_may_differ_but_not_shapes(self):
        self.write("half.npy", Tensor("F16", self.ref.shape, self.ref.values))
        self.call("compare", "half.npy", "ref.npy", "--max-rel-error=0.001")
        self.write("other.npy", noise(1, (2, 6, 3, 5)))
        _, stderr = self.call("compare", "other.npy", "ref.npy", code=FILE)
        self.assertIn("other.npy has shape [2, 6, 3, 5] but ref.npy has shape [2, 6, 3, 4]",
                      stderr)


class Demo(CliTest):
    PRESETS = ("SAGE1", "SAGE2_8B", "SAGE2_4B", "SAGE2PP", "INT4_UNSMOOTHED", "OFFICIAL")

    def write_case(self, name, dtype, mask, **metadata):
        """Keys with a large offset in each channel, which smoothing takes away."""
        q, k, v = noise(1, (1, 96, 4, 32), dtype), noise(2, (1, 96, 2, 32), dtype), noise(
            3, (1, 96, 2, 32), dtype)
        offsets = noise(4, (32,)).values
        k.values = [x + 8 * offsets[i % 32] for i, x in enumerate(k.values)]
        tensors = {f"layer_{layer:02}.{part}": tensor for layer in (0, 7)
                   for part, tensor in (("q", q), ("k", k), ("v", v))}
        strings = {"model": name, "mask": mask, "layout": "NHD", "sm_scale": "0.2", **metadata}
        self.write(f"{name}.safetensors", safetensors_bytes(tensors, strings))

    def test_json(self):
        self.write_case("one", "F16", "causal")
        self.write_case("two", "BF16", "none")
        rows = self.call_json("demo", "--data", ".")
        self.assertEqual([(row["case"], row["layer"], row["preset"]) for row in rows],
                         [(case, layer, preset) for case in ("one", "two")
                          for layer in ("layer_00", "layer_07") for preset in self.PRESETS])
        for row in rows:
            self.assertEqual(set(row), {"case", "layer", "preset", "cos", "l1", "rmse",
                                        "worst_cos", "worst_rmse", "ms"})
            for key in ("cos", "l1", "rmse", "worst_cos", "worst_rmse", "ms"):
                self.assertTrue(math.isfinite(row[key]), row)
            self.assertLessEqual(row["worst_cos"], row["cos"] + 1e-12)
            self.assertGreaterEqual(row["worst_rmse"], row["rmse"])
        for first in range(0, len(rows), len(self.PRESETS)):
            l1 = {row["preset"]: row["l1"] for row in rows[first:first + len(self.PRESETS)]}
            self.assertLess(l1["SAGE1"], l1["SAGE2_8B"])
            self.assertLess(l1["SAGE2_8B"], l1["SAGE2_4B"])
            self.assertLess(l1["SAGE2_4B"], l1["INT4_UNSMOOTHED"])
            self.assertLess(abs(l1["OFFICIAL"] / l1["SAGE2_8B"] - 1), 0.2)

    def test_choice_and_text(self):
        self.write_case("one", "F16", "causal")
        self.write_case("two", "BF16", "none")
        stdout, _ = self.call("demo", "--data", ".", "--files", "two.safetensors", "--preset",
                              "sage2_4b", "--preset", "OFFICIAL", "--threads", 1)
        rows = [line.split() for line in stdout.splitlines() if line.startswith("two ")]
        self.assertEqual([row[1:3] for row in rows],
                         [["layer_00", "SAGE2_4B"], ["layer_00", "OFFICIAL"],
                          ["layer_07", "SAGE2_4B"], ["layer_07", "OFFICIAL"]])
        self.assertNotIn("one", stdout)
        rows = self.call_json("demo", "--data=.", "--files=two", "--preset=sage1")
        self.assertEqual({row["case"] for row in rows}, {"two"})

    def test_shipped_data(self):
        rows = self.call_json("demo", "--files", "minilm-l6-v2.safetensors", "--preset",
                              "sage2_8b", cwd=ROOT)
        self.assertEqual([row["layer"] for row in rows], ["layer_00", "layer_03", "layer_05"])
        for row in rows:
            self.assertGreater(row["worst_cos"], 0.99)

    def test_errors(self):
        _, stderr = self.call("demo", "--data", ".", code=FILE)
        self.assertIn("holds no .safetensors file", stderr)
        self.call("demo", "--data", ".", "--files", "none.safetensors", code=FILE)
        self.write_case("one", "F32", "none")
        _, stderr = self.call("demo", "--data", ".", "--preset=official", code=FILE)
        self.assertIn("F16 and BF16 only", stderr)
        self.write_case("one", "F16", "none", sm_scale="none")
        self.call("demo", "--data", ".", code=FILE)
        self.write_case("one", "F16", "diagonal")
        _, stderr = self.call("demo", "--data", ".", code=FILE)
        self.assertIn("diagonal", stderr)


class Info(CliTest):
    def test_info(self):
        info = self.call_json("info", "--backend=cpu")
        self.assertEqual(set(info), {"version", "source_id", "report", "presets"})
        self.assertRegex(info["version"], r"^\d+\.\d+\.\d+$")
        self.assertRegex(info["source_id"], r"^[0-9a-f]+$")
        self.assertIn("arch", info["report"])
        names = ("auto", "sage1", "sage2_8b", "sage2_4b", "sage2pp", "exact")
        self.assertEqual([(p["preset"], p["head_dim"]) for p in info["presets"]],
                         [(name, dim) for dim in (64, 128) for name in names])
        plans = {p["preset"]: p["plan"] for p in info["presets"] if p["head_dim"] == 64}
        self.assertEqual(plans["sage2_4b"]["qk_format"], "i4")
        self.assertEqual(plans["exact"]["qk_format"], "none")
        for plan in plans.values():
            self.assertNotIn("auto", plan.values())
        stdout, _ = self.call("info", "--backend=cpu", "--arch=80")
        self.assertRegex(stdout, r"(?m)^version: \d")
        self.assertRegex(stdout, r"(?m)^pv_format +f16 ")

    def test_selftest(self):
        result = self.call_json("selftest", "--backend=cpu")
        self.assertIs(result["ok"], True)
        self.assertIn("SAGE2_8B, dense: passed", "\n".join(result["cases"]))
        self.assertIn("passed", self.call("selftest", "--backend=cpu")[0])

    def test_version(self):
        stdout, _ = self.call("--version")
        self.assertRegex(stdout, r"^\d+\.\d+\.\d+\n$")

    def test_help(self):
        stdout, _ = self.call("--help")
        self.assertEqual(self.call("help")[0], stdout)
        for word in ("run", "compare", "demo", "compile", "bench", "info", "selftest", "Exit codes"):
            self.assertIn(word, stdout)
        stdout, _ = self.call("run", "--help")
        for flag in ("--qk-format", "--smooth-v", "--promotion-interval", "--mask", "--sm-scale"):
            self.assertIn(flag, stdout)
        self.assertIn("causal_bottom_right", stdout)


class Compile(CliTest):
    def setUp(self):
        super().setUp()
        environment = unittest.mock.patch.dict(os.environ,
                                               SAGEATTN_CACHE_DIR=self.path("cache"))
        environment.start()
        self.addCleanup(environment.stop)

    def compile(self, *flags):
        done = subprocess.run([PROGRAM, "compile", "--json", *flags], capture_output=True,
                              text=True, check=False, cwd=self.folder.name)
        if "SAGEATTN_E_NVRTC_NOT_FOUND" in done.stderr:
            self.skipTest("no NVRTC")
        self.assertEqual(done.returncode, OK, done.stderr)
        return json.loads(done.stdout)

    def test_blobs(self):
        flags = ("--arch=80,89", "--head-dim=64", "--preset=sage1", "--out=new/blobs")
        result = self.compile(*flags)
        self.assertEqual([(plan["arch"], plan["dtype"]) for plan in result["plans"]],
                         [(80, "f16"), (80, "bf16"), (89, "f16"), (89, "bf16")])
        for plan in result["plans"]:
            self.assertEqual(set(plan), {"arch", "preset", "head_dim", "dtype", "kernel_name",
                                         "registers", "spill_bytes", "smem_bytes", "ms"})
            self.assertGreater(plan["registers"], 0)
        # Plans that share kernels: whichever was first compiled them.
        self.assertGreater(sum(plan["ms"] for plan in result["plans"]), 0)
        self.assertEqual(result["files"],
                         ["new/blobs/sageattn-sm_80.blob", "new/blobs/sageattn-sm_89.blob"])
        blobs = {}
        for file in result["files"]:
            with open(self.path(file), "rb") as stream:
                blobs[file] = stream.read()
            self.assertEqual(blobs[file][:8], b"SAGEBLOB")
        # Out of the cache now, and the same bytes.
        result = self.compile(*flags)
        self.assertEqual({plan["ms"] for plan in result["plans"]}, {0})
        for file, blob in blobs.items():
            with open(self.path(file), "rb") as stream:
                self.assertEqual(stream.read(), blob)

    def test_kernels(self):
        with open(RESOURCES, encoding="utf-8") as file:
            recorded_with = file.readline()[len("# NVRTC "):].strip()
            table = {(row["kernel"], row["macros"], row["arch"]): row
                     for row in csv.DictReader(file, delimiter="\t")}
        flags = ("--arch=80,89", "--head-dim=128", "--preset=sage1", "--out=blobs")
        result = self.compile(*flags)
        kernels = result["kernels"]
        # f16 and bf16 share every specialisation, so each arch has each once.
        self.assertEqual([(row["arch"], row["kernel"]) for row in kernels],
                         [(arch, kernel) for arch in (80, 89)
                          for kernel in ("attn_sm80", "prepare", "sequences")])
        with open(self.path(result["files"][0]), "rb") as stream:
            entry = stream.read()[88:]
        version, = struct.unpack_from("<I", entry, 12)
        build = entry[16:48].rstrip(b"\0").decode()
        same_build = f"{version // 1000}.{version % 1000 // 10} {build}" == recorded_with
        for row in kernels:
            with self.subTest(row=row):
                self.assertEqual(set(row), {"kernel", "macros", "arch", "registers",
                                            "spill_bytes", "smem", "ms"})
                self.assertGreater(row["ms"], 0)
                want = table[row["kernel"], row["macros"] or "-", f"sm_{row['arch']}"]
                self.assertGreaterEqual(row["smem"], int(want["dynamic_smem"]))
                if same_build:
                    self.assertEqual(row["registers"], int(want["registers"]))
                    self.assertEqual(row["spill_bytes"], int(want["spill_bytes"]))
                    self.assertEqual(row["smem"], int(want["static_smem"]) +
                                     int(want["dynamic_smem"]))
        self.assertEqual({(plan["arch"], plan["registers"]) for plan in result["plans"]},
                         {(row["arch"], row["registers"]) for row in kernels
                          if row["kernel"] == "attn_sm80"})
        self.assertAlmostEqual(sum(row["ms"] for row in kernels),
                               sum(plan["ms"] for plan in result["plans"]), delta=0.1)
        again = self.compile(*flags)["kernels"]  # out of the cache
        self.assertEqual(again, [{**row, "ms": 0} for row in kernels])

        stdout, _ = self.call("compile", *flags)
        for row in kernels:
            line = [str(row["arch"]), row["kernel"], *row["macros"].split(),
                    str(row["registers"]), str(row["spill_bytes"]), str(row["smem"]), "0"]
            self.assertIn(line, [text.split() for text in stdout.splitlines()])

    def test_what_an_arch_cannot_run(self):
        _, stderr = self.call("compile", "--arch=80", "--preset=sage2_8b", "--head-dim=64",
                              code=LIBRARY)
        self.assertIn("arch 80, sage2_8b, head_dim 64", stderr)
        self.assertIn("SAGEATTN_E_UNSUPPORTED", stderr)
        result = self.compile("--arch=80", "--head-dim=64")
        unsupported = {plan["preset"] for plan in result["plans"] if "error" in plan}
        self.assertIn("sage2_8b", unsupported)
        self.assertNotIn("sage1", unsupported)

    def test_errors(self):
        self.call("compile", "--preset=sage1,sage9", code=USAGE)
        self.call("compile", "--arch=eighty", code=USAGE)
        for flag, text in (("--arch", "80,,90"), ("--arch", "80,"), ("--arch", ",80"),
                           ("--arch", ""), ("--arch", "0"), ("--arch", "80,0"),
                           ("--head-dim", "64,,128"), ("--preset", "sage1,")):
            with self.subTest(flag=flag, text=text):
                _, stderr = self.call("compile", flag, text, "--out=none", code=USAGE)
                self.assertIn(flag, stderr)
                self.assertFalse(os.path.exists(self.path("none")))
        self.call("compile", "--arch=75", code=LIBRARY)
        _, stderr = self.call("compile", "--arch=sm_75a", code=LIBRARY)  # as people write them
        self.assertIn("target_arch = 75", stderr)
        _, stderr = self.call("compile", "--arch=90b", code=USAGE)
        self.assertIn("'90b' is none of 80, 86, 89, 90, 120", stderr)
        self.write("file", b"")
        self.call("compile", "--arch=80", "--out=file/below", code=FILE)
        with unittest.mock.patch.dict(os.environ, SAGEATTN_NVRTC=self.path("none")):
            _, stderr = self.call("compile", "--arch=80", code=LIBRARY)
        self.assertIn("SAGEATTN_E_NVRTC_NOT_FOUND", stderr)


class Bench(CliTest):
    SMALL = ("--batch=2", "--heads=2", "--kv-heads=1", "--dims=64", "--seqs=64,128", "--repeat=3",
             "--warmup=1")
    PERFORMANCE = os.path.join(ROOT, "tests", "make_performance.py")

    def bench(self, *flags, file="bench.json"):
        """The report, and what is on stdout."""
        stdout, _ = self.call("bench", *self.SMALL, "--json", file, *flags)
        with open(self.path(file), encoding="utf-8") as written:
            return json.load(written), stdout

    def test_cpu(self):
        report, stdout = self.bench("--backend=cpu", "--preset=sage2_8b", "--preset=exact",
                                    "--csv=bench.csv", "--svg=bench.svg", "--smooth-q=off",
                                    "--smooth-v=off", "--qk-granularity=per_warp",
                                    "--promotion-interval=512", "--dtype=f16", "--lse")
        self.assertEqual(set(report), {"version", "source_id", "date", "command", "machine",
                                       "settings", "rows"})
        self.assertRegex(report["date"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
        self.assertTrue(report["command"].startswith("sageattn bench --batch=2 --heads=2 "))
        self.assertEqual(report["machine"]["backend"], "cpu")
        self.assertIsNone(report["machine"]["rates"])
        self.assertEqual(report["settings"],
                         {"batch": 2, "heads": 2, "kv_heads": 1, "dtype": "f16", "lse": True,
                          "numerics": {"smooth_q": "off", "smooth_v": "off",
                                       "qk_granularity": "per_warp", "promotion_interval": 512},
                          "repeat": 3, "warmup": 1})
        rows = report["rows"]
        self.assertEqual([(row["preset"], row["mask"], row["head_dim"], row["seq"]) for row in rows],
                         [(preset, mask, 64, seq) for preset in ("sage2_8b", "exact")
                          for mask in ("full", "causal") for seq in (64, 128)])
        for row in rows:
            operations = 4 * 2 * 2 * row["seq"] ** 2 * 64 / (2 if row["mask"] == "causal" else 1)
            self.assertGreater(row["ms"], 0)
            self.assertAlmostEqual(row["tops"] * row["ms"] * 1e9 / operations, 1)
            for key in ("attention_tops", "attention_ms", "attention_peak_share", "preparation_ms",
                        "preparation_bytes", "preparation_copy_share"):
                self.assertIsNone(row[key])
            self.assertEqual(row["plan"]["q_dtype"], "f16")
            self.assertIn([row["preset"], row["kernel_name"], row["mask"], "64", str(row["seq"])],
                          [line.split()[:5] for line in stdout.splitlines()])
        for key, value in report["settings"]["numerics"].items():
            self.assertEqual(rows[0]["plan"][key], value)
        self.assertIsNone(rows[-1]["plan"]["qk_granularity"])  # EXACT, which quantizes nothing

        with open(self.path("bench.csv"), encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        self.assertEqual([{key: line[key] for key in ("preset", "mask", "seq", "attention_ms")}
                          for line in table],
                         [{"preset": row["preset"], "mask": row["mask"], "seq": str(row["seq"]),
                           "attention_ms": ""} for row in rows])
        self.assertEqual([float(line["ms"]) for line in table], [row["ms"] for row in rows])

        picture = xml.etree.ElementTree.parse(self.path("bench.svg")).getroot()
        tags = [element.tag.split("}")[1] for element in picture.iter()]
        self.assertEqual((tags.count("polyline"), tags.count("circle")), (4, 8))
        labels = {element.text for element in picture.iter() if element.tag.endswith("}text")}
        self.assertLessEqual({"64", "128", "exact cpu_exact, dim 64, causal"}, labels)

    def test_device(self):
        self.fake_device(FAKE_CUDA_NAME="NVIDIA H200")
        report, _ = self.bench("--preset=sage1,sage2_4b", "--kernel=mma_sync", "--mask=full")
        machine = report["machine"]
        self.assertEqual((machine["backend"], machine["name"], machine["cuda"], machine["nvrtc"]),
                         ("cuda", "NVIDIA H200", "13.0", "13.0"))
        self.assertEqual(machine["max_sm_clock_mhz"], 1980)
        rates = machine["rates"]
        peak = 2 / (1 / rates["s8_tops"] + 1 / rates["e4m3_tops"])
        for row in report["rows"]:
            self.assertEqual((row["ms"], row["attention_ms"]), (1, 1))  # every launch takes 1 ms
            self.assertGreaterEqual(row["preparation_ms"], 1)
            head = 2 * row["seq"] * 64  # bf16; Q has two heads, K and V one
            i4 = row["preset"] == "sage2_4b"
            self.assertEqual(row["preparation_bytes"],
                             head * (4 * 2 + 3 * (0.5 if i4 else 1) + (1 if i4 else 2)))
            self.assertAlmostEqual(row["preparation_copy_share"] * row["preparation_ms"],
                                   row["preparation_bytes"] * 1e3 / rates["copy_bytes_per_second"])
            if i4:
                self.assertAlmostEqual(row["attention_peak_share"], row["attention_tops"] / peak)
            else:
                self.assertIsNone(row["attention_peak_share"])  # nobody measured FP16
            # The other buffers fill the L2 cache, which has 1 MB.
            self.assertGreaterEqual((row["buffers"] - 1) * head * 2 * (2 + 1) * 2, machine["l2_bytes"])
        self.fake_device(FAKE_CUDA_NAME="NVIDIA H20")
        report, _ = self.bench("--preset=sage2_8b", "--seqs=64")
        self.assertIsNone(report["machine"]["rates"])
        self.assertIsNone(report["rows"][0]["attention_peak_share"])
        self.assertIsNone(report["rows"][0]["preparation_copy_share"])

    def test_rows_that_cannot_be_run(self):
        report, stdout = self.bench("--backend=cpu", "--arch=80", "--preset=sage1,sage2_8b",
                                    "--kernel=wgmma,mma_sync", "--csv=bench.csv")
        errors = {(row["preset"], row["kernel"]) for row in report["rows"] if "error" in row}
        self.assertIn(("sage1", "wgmma"), errors)
        self.assertNotIn(("sage1", "mma_sync"), errors)
        self.assertRegex(stdout, r"(?m)^sage1, kernel wgmma, full, dim 64, 64 tokens and \d+ more: ")
        with open(self.path("bench.csv"), encoding="utf-8", newline="") as file:
            self.assertIn("SAGEATTN_E_", next(csv.DictReader(file))["error"])

    def test_errors(self):
        for flags, message in (
                (("--batch=0",), "--batch: Value 0 not in range 1 to 4096"),
                (("--dims=64,257",), "--dims: Value 257 not in range 1 to 256"),
                (("--seqs=many",), "--seqs: Value many not in range 1 to 16777216"),
                (("--repeat=0",), "--repeat: Value 0 not in range 1 to 100000"),
                (("--kv-heads=3", "--heads=4"), "--kv-heads: 3 does not divide --heads 4"),
                (("--mask=window",), "--mask: unknown value 'window'; it takes full, causal"),
                (("--kernel=mma",), "--kernel: unknown value 'mma'; it takes auto, mma_sync, wgmma"),
                (("--preset=sage1,sage9",), "--preset: unknown value 'sage9'"),
                (("--smooth-q=yes",), "--smooth-q: unknown value 'yes'; it takes auto, on, off"),
                (("--out-dtype=f32",), "--out-dtype")):
            with self.subTest(flags):
                _, stderr = self.call("bench", "--backend=cpu", *flags, code=USAGE)
                self.assertIn(message, stderr)
        _, stderr = self.call("bench", "--backend=cpu", "--svg=no_folder/a.svg", code=FILE)
        self.assertIn("no_folder/a.svg: cannot be written", stderr)
        _, stderr = self.call("bench", *self.SMALL, "--backend=cpu", "--preset=sage2_8b",
                              "--promotion-interval=7", "--json=bench.json", code=LIBRARY)
        self.assertIn("sage2_8b, kernel auto, full, dim 64, 64 tokens: ", stderr)
        self.assertIn("promotion_interval = 7", stderr)
        self.assertFalse(os.path.exists(self.path("bench.json")))

    def overheads(self, *flags):
        """What examples/python/overheads.py reports, and its section of the document."""
        path = self.path("overheads.json")
        subprocess.run([sys.executable, "-B", os.path.join(ROOT, "examples", "python", "overheads.py"),
                        "--program", PROGRAM, "--out", path, "--dims=64", "--seqs=64,128",
                        "--batch=1", "--heads=1", "--repeat=1", "--warmup=0", *flags],
                       capture_output=True, check=True)
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        return report, "\n".join(accuracy_on_gpu.overheads(report))

    def test_overheads_on_a_device(self):
        self.fake_device()
        report, section = self.overheads()
        techniques = {(baseline["name"], technique["name"]): technique
                      for baseline in report["baselines"] for technique in baseline["techniques"]}
        refused = {name for (_, name), technique in techniques.items() if "refused" in technique}
        self.assertEqual(refused, {"scales per token, not per thread", "single level", "sums in fp32"})
        for key, technique in techniques.items():
            for row in technique.get("rows", []):
                with self.subTest(key):
                    self.assertEqual(row["overhead"], 0)  # every launch takes 1 ms
                    self.assertEqual(row["attention_ms"], {"without": 1, "with": 1})
        # Smoothing Q takes a launch more, whether it is the baseline's or the technique's.
        for baseline in ("SAGE2_8B, wgmma", "SAGE2_4B, wgmma"):
            times = techniques[baseline, "Q smoothed"]["rows"][0]["preparation_ms"]
            self.assertGreater(times["with"], times["without"])
        self.assertNotIn("Not a GPU's", section)
        self.assertIn("(1) sageattn_plan_create: qk_granularity = ", section)
        self.assertIn("| K smoothed | `--smooth-k off` | +0.0 (+0.0) | +0.0 (+0.0) |  |", section)

    def test_overheads_without_a_device(self):
        report, section = self.overheads("--backend=cpu")
        self.assertIn("**Not a GPU's: ", section)
        for row in report["baselines"][0]["techniques"][0]["rows"]:
            self.assertAlmostEqual(row["overhead"], row["ms"]["with"] / row["ms"]["without"] - 1)

    def make_performance(self, *flags):
        return subprocess.run([sys.executable, "-B", self.PERFORMANCE, *flags, self.folder.name],
                              capture_output=True, text=True, check=False).returncode

    def test_performance_document(self):
        self.assertEqual(self.make_performance("--check"), 0)  # nothing measured, nothing written
        self.assertEqual(self.make_performance(), 0)
        self.assertFalse(os.path.exists(self.path("performance.md")))
        os.mkdir(self.path("performance"))
        report, _ = self.bench("--backend=cpu", file="performance/cpu.json")
        self.fake_device()
        self.bench("--preset=sage1,sage2_8b", "--svg=performance/gpu.svg",
                   file="performance/gpu.json")
        self.assertNotEqual(self.make_performance("--check"), 0)
        self.assertEqual(self.make_performance(), 0)
        self.assertEqual(self.make_performance("--check"), 0)
        with open(self.path("performance.md"), encoding="utf-8") as file:
            text = file.read()
        for part in (report["command"], report["machine"]["name"], "](performance/gpu.svg)",
                     "## Fake GPU 0, bf16, batch 2, heads 2/1", "| 64 | 128 |",
                     "| sage1 | attn_sm80_i8_f16 | 64 | causal | "):
            self.assertIn(part, text)
        self.assertNotIn("cpu.svg", text)


class Assess(CliTest):
    SHAPES = ((1, 96, 2, 32), (1, 96, 1, 32), (1, 96, 1, 32))

    def layer(self, seed, shapes=SHAPES, dtype="F16"):
        return dict(zip("qkv", (noise(seed + i, shape, dtype) for i, shape in enumerate(shapes)),
                        strict=True))

    def write_layers(self, layers, metadata=None, name="model.safetensors"):
        tensors = {f"{layer}.{part}": tensor for layer, parts in layers.items()
                   for part, tensor in parts.items()}
        return self.write(name, safetensors_bytes(tensors, metadata))

    def assess(self, *flags):
        """The report, and what is on stdout."""
        stdout, _ = self.call("assess", *flags, "--json=report.json")
        with open(self.path("report.json"), encoding="utf-8") as file:
            return json.load(file), stdout

    def test_statistics(self):
        layer = self.layer(1)
        for token in range(96):  # an offset in one channel of K and of V
            layer["k"][0, token, 0, 3] += 8
            layer["v"][0, token, 0, 5] += 20
        layer = {name: tensor.rounded() for name, tensor in layer.items()}
        report, stdout = self.assess(
            self.write_layers({"a": layer}, {"mask": "causal", "sm_scale": "0.25"}), "--rows=96")
        self.assertEqual((report["mask"], len(report["layers"])), ("causal", 1))
        heads = report["layers"][0]["heads"]
        self.assertEqual([(head["head"], head["kv_head"]) for head in heads], [(0, 0), (1, 0)])
        k = layer["k"]
        columns = [[k[0, token, 0, c] for token in range(96)] for c in range(32)]
        means = [sum(column) / 96 for column in columns]
        deviations = [math.sqrt(sum((x - mean) ** 2 for x in column) / 96)
                      for column, mean in zip(columns, means, strict=True)]
        energy = sum(x * x for x in k.values) / 96
        got = heads[0]["k"]
        self.assertEqual((got["min"], got["max"]), (min(k.values), max(k.values)))
        self.assertEqual(got["absmax"], max(map(abs, k.values)))
        self.assertAlmostEqual(got["mean_over_std"],
                               max(abs(m) / d for m, d in zip(means, deviations, strict=True)), 4)
        self.assertAlmostEqual(got["mean_share"], sum(m * m for m in means) / energy, 6)
        largest = sorted(max(map(abs, column)) for column in columns)
        self.assertAlmostEqual(got["channel_ratio"], largest[-1] / largest[16], 6)
        self.assertLess(heads[0]["k_smoothed"]["mean_share"], 1e-9)
        self.assertLess(heads[0]["k_smoothed"]["absmax"], 6)
        self.assertGreater(heads[0]["v"]["mean_over_std"], 15)

        # The softmax, from its definition.
        q = layer["q"]
        largest, effective = 0, 0
        for i in range(96):
            scores = [0.25 * sum(q[0, i, 1, c] * k[0, j, 0, c] for c in range(32))
                      for j in range(i + 1)]
            weights = [math.exp(score - max(scores)) for score in scores]
            weights = [weight / sum(weights) for weight in weights]
            largest += max(weights) / 96
            effective += math.exp(-sum(w * math.log(w) for w in weights if w)) / 96
        self.assertAlmostEqual(heads[1]["softmax"]["max_probability"], largest, 4)
        self.assertAlmostEqual(heads[1]["softmax"]["effective_keys"] / effective, 1, 4)
        self.assertEqual(heads[1]["softmax"]["visible_keys"], 48.5)

        histogram = report["layers"][0]["k_histograms"][0]
        self.assertEqual((sum(histogram["before"]), sum(histogram["after"])), (96 * 32, 96 * 32))
        self.assertIn("a      1 ", stdout)

    def test_errors_are_those_of_run(self):
        layer = self.layer(5)
        report, _ = self.assess(*self.write_qkv(*layer.values()))
        for variant, flags in ((0, ["--preset=sage2_4b"]), (3, ["--preset=sage1"]),
                               (5, ["--preset=sage2_8b", "--smooth-v=off"])):
            out = self.attend(*layer.values(), *flags, "--out-dtype=f32")
            exact = self.attend(*layer.values(), "--preset=exact", "--out-dtype=f32")
            self.assertAlmostEqual(report["layers"][0]["presets"][variant]["rel_error"],
                                   relative_error(out, exact), 6)

    def test_predictions(self):
        """Within a factor of two of what is measured, and 4-bit far from 8-bit."""
        report, _ = self.assess(*self.write_qkv(*self.layer(9).values()))
        for head in report["layers"][0]["heads"]:
            for result in head["presets"]:
                self.assertLess(abs(math.log2(result["predicted_error"] / result["rel_error"])), 1)
            self.assertGreater(head["presets"][0]["predicted_error"],
                               2 * head["presets"][1]["predicted_error"])

    def test_recommendations(self):
        path = self.write_layers({"a": self.layer(1), "b": self.layer(5)})
        report, _ = self.assess(path, "--layers=b")
        self.assertEqual([layer["name"] for layer in report["layers"]], ["b"])
        errors = [result["rel_error"] for head in report["layers"][0]["heads"]
                  for result in head["presets"]]
        for target, preset in ((0.9, "sage2_4b"), (max(errors[1], errors[7]) + 1e-4, "sage2_8b"),
                               (max(errors[3], errors[9]) + 1e-5, "sage1"), (1e-7, "exact")):
            report, stdout = self.assess(path, "--layers=b", f"--target-error={target}")
            self.assertEqual(report["recommendation"]["preset"], preset)
            self.assertIn(f"all with one plan: {preset}", stdout)
        report, _ = self.assess(path, "--target-cos=0.9999999999")
        self.assertEqual(report["recommendation"]["preset"], "exact")
        self.assertIsNone(report["target"]["max_rel_error"])

    def test_v_with_an_offset_is_smoothed(self):
        layer = self.layer(1)
        layer["v"] = Tensor("F16", layer["v"].shape, [x + 20 for x in layer["v"].values]).rounded()
        report, _ = self.assess(*self.write_qkv(*layer.values()))
        self.assertEqual(report["recommendation"]["preset"], "sage2_4b")
        self.assertTrue(report["recommendation"]["smooth_v"])
        smoothed, unsmoothed = (report["layers"][0]["presets"][i]["rel_error"] for i in (1, 5))
        self.assertLess(smoothed, unsmoothed)

    def test_elements_that_are_not_finite(self):
        for part in "qkv":
            for value in (math.nan, math.inf):
                with self.subTest(part=part, value=value):
                    layer = self.layer(1)
                    layer[part][0, 7, 0, 3] = value
                    report, _ = self.assess(*self.write_qkv(*layer.values()), "--html=page.html")
                    head = report["layers"][0]["heads"][0]
                    self.assertEqual(head[part]["nonfinite"], 1)
                    self.assertLess(head[part]["absmax"], 10)
                    self.assertEqual(head["recommendation"]["preset"], "exact")
                    self.assertIn("not finite", head["recommendation"]["reason"])
                    self.assertEqual(report["recommendation"]["preset"], "exact")

    def test_constant_tensors(self):
        layer = {name: Tensor(tensor.dtype, tensor.shape, [0.0] * len(tensor.values))
                 for name, tensor in self.layer(1).items()}
        report, _ = self.assess(*self.write_qkv(*layer.values()), "--html=page.html")
        head = report["layers"][0]["heads"][0]
        self.assertEqual((head["k"]["mean_over_std"], head["k"]["mean_share"]), (0, 0))
        self.assertEqual(report["recommendation"]["preset"], "sage2_4b")

    def test_batch_layout_and_one_token(self):
        layer = self.layer(1, ((2, 3, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8)))
        nhd, _ = self.assess(*self.write_qkv(*layer.values()))
        self.assertEqual([(head["batch"], head["head"]) for head in nhd["layers"][0]["heads"]],
                         [(0, 0), (0, 1), (1, 0), (1, 1)])
        transposed = [tensor.transposed() for tensor in layer.values()]
        hnd, _ = self.assess(*self.write_qkv(*transposed), "--layout=hnd")
        self.assertEqual(nhd, hnd)
        # Queries before the first key see none.
        causal, _ = self.assess(*self.write_qkv(*layer.values()), "--mask=causal")
        self.assertEqual(causal["layers"][0]["heads"][0]["softmax"]["visible_keys"], 1)

    def test_html(self):
        layers = {"a<b": self.layer(1), "c": self.layer(5)}
        self.call("assess", self.write_layers(layers, {"model": "x & y"}), "--html=page.html",
                  "--target-cos=0.99")
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = file.read()
        self.assertIn("<h1>x &amp; y</h1>", page)
        self.assertIn("CosSim of at least 0.99000 in every head", page)
        self.assertNotIn("a<b", page)
        self.assertIn("prefers-color-scheme: dark", page)
        for outside in ("http", "<script", "<link", "@import", "url(", "<img"):
            self.assertNotIn(outside, page)
        for tag in ("span", "div", "p", "h3", "figure", "table", "tr", "td", "th", "g", "text"):
            opened = page.count(f"<{tag} ") + page.count(f"<{tag}>")
            self.assertEqual(opened, page.count(f"</{tag}>"), tag)
            self.assertGreater(opened, 0)
        for svg in page.split("<svg")[1:]:
            xml.etree.ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
        # Recommendations and six variants, two layers of two heads each; then K.
        self.assertEqual(page.count("<title>") - 1, 7 * 4)
        self.assertEqual(page.count("range of each channel of K"), 2 * 2)
        self.assertNotRegex(page, r"(?i)[^a-z]nan[^a-z]|[^a-z]inf[^a-z]")

    def test_shipped_data(self):
        report, _ = self.assess(os.path.join(ROOT, "examples", "data", "minilm-l6-v2.safetensors"),
                                "--layers=layer_00")
        self.assertEqual(report["recommendation"]["preset"], "sage2_8b")
        k = [head["k"] for head in report["layers"][0]["heads"]]
        # As examples/data/README.md has it.
        self.assertEqual(round(max(head["absmax"] for head in k), 2), 12.27)
        self.assertEqual(round(max(head["mean_over_std"] for head in k), 1), 1.7)

    def test_device(self):
        self.fake_device()  # it computes nothing: all outputs are 0
        report, _ = self.assess(*self.write_qkv(*self.layer(1).values()), "--backend=cuda")
        for result in report["layers"][0]["presets"]:
            self.assertEqual(result.get("rel_error", 0), 0)

    def test_what_an_arch_cannot_run(self):
        report, stdout = self.assess(*self.write_qkv(*self.layer(1).values()), "--arch=80",
                                     "--html=page.html")
        results = report["layers"][0]["heads"][0]["presets"]
        self.assertEqual([result["preset"] for result in results if "error" in result],
                         ["sage2_4b", "sage2_8b", "sage2pp", "sage2_4b", "sage2_8b"])
        self.assertIn("SAGEATTN_E_UNSUPPORTED", results[0]["error"])
        self.assertEqual(report["recommendation"]["preset"], "sage1")
        self.assertIn("all with one plan: sage1 (2 of 2 need it): --preset sage1\n", stdout)

    def test_a_gpu_errs_as_the_cpu_does(self):
        qkv = self.write_qkv(*self.layer(1).values())
        done = subprocess.run([PROGRAM, "assess", *qkv, "--backend=cuda", "--json=gpu.json"],
                              capture_output=True, text=True, check=False, cwd=self.folder.name)
        if "SAGEATTN_E_NO_DEVICE" in done.stderr:
            self.assertEqual(done.returncode, LIBRARY)
            self.skipTest("no GPU")
        self.assertEqual(done.returncode, OK, done.stderr)
        with open(self.path("gpu.json"), encoding="utf-8") as file:
            gpu = json.load(file)["layers"][0]["presets"]
        cpu = self.assess(*qkv)[0]["layers"][0]["presets"]
        for one, other in zip(gpu, cpu, strict=True):
            if "error" not in one:
                self.assertLess(abs(math.log2(one["rel_error"] / other["rel_error"])), 0.5)

    def test_errors(self):
        good = self.layer(1)
        path = self.write_layers({"a": good})
        qkv = self.write_qkv(*good.values())
        for flags, message in (
                ([], "give FILE, or all of --q, --k and --v"),
                (qkv[:4], "give FILE, or all of"),
                ([path, *qkv], "FILE: goes without --q"),
                ([qkv[1]], "not a .safetensors file"),
                ([*qkv, "--layers=a"], "--layers: needs FILE"),
                ([path, "--target-error=0"], "--target-error: 0.000000 is not above 0"),
                ([path, "--target-error=nan"], "--target-error"),
                ([path, "--target-cos=1"], "--target-cos: 1.000000 is not above 0 and below 1"),
                ([path, "--rows=0"], "--rows: Value 0 not in range 1 to"),
                ([path, "--mask=window"], "--mask: unknown value 'window'; it takes none, causal")):
            with self.subTest(message):
                self.assertIn(message, self.call("assess", *flags, code=USAGE)[1])
        for layers, metadata, message in (
                ({"a": good, "b": {"q": good["q"], "k": good["k"]}}, None,
                 "holds 'b.k' but no 'b.v'"),
                ({"a": {"x": good["q"]}}, None, "holds no tensors NAME.q"),
                ({"a": self.layer(1, ((1, 9, 2, 8), (1, 9, 2, 8), (1, 8, 2, 8)))}, None,
                 "a: k and v differ in their tokens"),
                ({"a": self.layer(1, ((1, 9, 3, 8), (1, 9, 2, 8), (1, 9, 2, 8)))}, None,
                 "a: the heads of q are not a multiple"),
                ({"a": self.layer(1, ((9, 8), (9, 8), (9, 8)))}, None, "a: q has shape [9, 8]"),
                ({"a": self.layer(1, ((1, 0, 2, 8), (1, 9, 2, 8), (1, 9, 2, 8)))}, None,
                 "a: there is nothing to assess in a tensor of shape [1, 0, 2, 8]"),
                ({"a": self.layer(1, ((1, 9, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8)))}, None,
                 "a: there is nothing to assess"),
                ({"a": good}, {"mask": "tree"}, "its mask is 'tree'"),
                ({"a": good}, {"sm_scale": "much"}, "its sm_scale is 'much'"),
                ({"a": good}, {"layout": "DHN"}, "its layout is 'DHN'")):
            with self.subTest(message):
                self.write_layers(layers, metadata, "bad.safetensors")
                self.assertIn(message,
                              self.call("assess", "bad.safetensors", "--json=no.json", code=FILE)[1])
                self.assertFalse(os.path.exists(self.path("no.json")))
        stderr = self.call("assess", path, "--layers=a,z", code=FILE)[1]
        self.assertIn("holds no layer 'z'; it holds: a", stderr)
        self.call("assess", path, "--html=no_folder/a.html", code=FILE)
        self.call("assess", path, "--sm-scale=inf", code=LIBRARY)


class EstimateCommand(CliTest):
    SHAPE = ("--layers=32", "--heads=32", "--kv-heads=8", "--head-dim=128", "--batch=4")

    def rows(self, preset, tops, mask="causal", dim=128):
        return [{"preset": preset, "mask": mask, "head_dim": dim, "seq": seq, "tops": speed}
                for seq, speed in tops.items()]

    def report(self, rows, name="bench.json"):
        content = {"machine": {"name": "Fast GPU"}, "settings": {"batch": 4, "heads": 32},
                   "rows": rows}
        return self.write(name, json.dumps(content).encode())

    def both(self):
        return self.report(self.rows("exact", {1024: 100, 4096: 200}) +
                           self.rows("sage2_8b", {4096: 600, 1024: 200}))

    def test_time(self):
        flags = (*self.SHAPE, "--bench", self.both(), "--attention-share=0.5")
        result = self.call_json("estimate", *flags, "--seq=4096")
        operations = 4 * 32 * 4 * 32 * 4096 ** 2 * 128 / 2
        self.assertEqual(result["attention_operations"], operations)
        self.assertAlmostEqual(result["attention_before_ms"], operations / 200e9)
        self.assertAlmostEqual(result["attention_after_ms"], operations / 600e9)
        self.assertAlmostEqual(result["attention_speedup"], 3)
        self.assertAlmostEqual(result["other_ms"], result["attention_before_ms"])
        self.assertAlmostEqual(result["speedup"], 1 / (0.5 + 0.5 / 3))
        self.assertAlmostEqual(result["amdahl_bound"], 2)
        self.assertEqual(result["notes"], [])
        # Half way in log(seq) is half way in speed.
        result = self.call_json("estimate", *flags, "--seq=2048")
        self.assertAlmostEqual(result["measured"]["after"]["tops"], 400)
        self.assertAlmostEqual(result["measured"]["before"]["tops"], 150)
        full = self.call("estimate", *flags, "--seq=4096", "--mask=full", code=FILE)[1]
        self.assertIn("holds no rows of sage2_8b, full, dim 128; it holds:", full)
        self.assertIn("exact, causal, dim 128", full)

    def test_baselines_and_other(self):
        flags = (*self.SHAPE, "--bench", self.both(), "--seq=4096")
        result = self.call_json("estimate", *flags, "--baseline-attention-ms=100",
                                "--other-flops=3e14", "--tflops=1000")
        self.assertEqual(result["attention_before_ms"], 100)
        self.assertAlmostEqual(result["other_ms"], 300)
        self.assertAlmostEqual(result["attention_share"], 0.25)
        result = self.call_json("estimate", *flags, "--baseline-tops=300", "--attention-share=1")
        self.assertAlmostEqual(result["speedup"], 2)
        self.assertIsNone(result["amdahl_bound"])
        other = self.report(self.rows("sage1", {4096: 300}), "other.json")
        result = self.call_json("estimate", *flags, "--baseline-bench", other,
                                "--baseline-preset=sage1", "--attention-share=0.2")
        self.assertAlmostEqual(result["attention_speedup"], 2)

    def test_extrapolation(self):
        flags = (*self.SHAPE, "--bench", self.both(), "--attention-share=0.5")
        result = self.call_json("estimate", *flags, "--seq=8192")
        self.assertEqual(result["measured"]["after"], {
            "what": "sage2_8b, causal, dim 128", "machine": "Fast GPU", "tops": 600,
            "extrapolated_by": 2})
        self.assertIn("after: extrapolated by a factor of 2.00", result["notes"][0])
        for seq in (8193, 511):
            stderr = self.call("estimate", *flags, f"--seq={seq}", code=FILE)[1]
            self.assertIn(f"--seq {seq} is a factor of 2.0 beyond what was measured of "
                          "sage2_8b, causal, dim 128 (1024..4096); the limit is 2", stderr)
        stdout, _ = self.call("estimate", *flags, "--seq=65536", "--extrapolate")
        self.assertIn("note: after: extrapolated by a factor of 16.00", stdout)

    def test_less_work_than_was_measured_is_noted(self):
        result = self.call_json("estimate", *self.SHAPE[:-1], "--bench", self.both(),
                                "--attention-share=0.5", "--seq=4096")
        self.assertIn("batch * heads = 128, asked for 32", result["notes"][0])

    def test_shipped_measurements(self):
        folder = os.path.join(ROOT, "docs", "performance")
        stdout, _ = self.call("estimate", *self.SHAPE, "--seq=16384", "--bench",
                              os.path.join(folder, "h200.json"), "--baseline-bench",
                              os.path.join(folder, "h200-presets.json"), "--attention-share=0.4")
        self.assertIn("on NVIDIA H200", stdout)
        self.assertRegex(stdout, r"(?m)^whole .* 1\.\d\d$")

    def test_errors(self):
        base = [*self.SHAPE, "--seq=4096", "--bench", self.both()]
        for flags, message in (
                ([], "give --other-flops with --tflops, or --attention-share"),
                (["--other-flops=1"], "--tflops"),
                (["--attention-share=0"], "--attention-share: 0.000000 is not above 0"),
                (["--attention-share=1.5"], "--attention-share: 1.500000"),
                (["--attention-share=nan"], "--attention-share"),
                (["--other-flops=-1", "--tflops=1"], "--other-flops: -1.000e+00 is negative"),
                (["--other-flops=1", "--tflops=0"], "--tflops: 0.000e+00 is not above 0"),
                (["--attention-share=0.5", "--baseline-attention-ms=inf"], "--baseline-attention-ms"),
                (["--attention-share=0.5", "--baseline-tops=1", "--baseline-attention-ms=1"],
                 "--baseline-tops"),
                (["--attention-share=0.5", "--kv-heads=5"], "--kv-heads")):
            with self.subTest(flags=flags):
                self.assertIn(message, self.call("estimate", *base, *flags, code=USAGE)[1])
        stderr = self.call("estimate", "--layers=1", "--heads=32", "--kv-heads=5", "--head-dim=64",
                           "--seq=9", "--bench=a", "--attention-share=1", code=USAGE)[1]
        self.assertIn("--kv-heads: 5 does not divide --heads 32", stderr)
        share = [*self.SHAPE, "--seq=4096", "--attention-share=0.5", "--bench"]
        row = self.rows("sage2_8b", {4096: 1})[0]
        for content, message in (
                (b"", "has no list 'rows'"), (b"{", "has no list 'rows'"), (b"[]", "no list 'rows'"),
                (b'{"rows": 3}', "no list 'rows'"), (b'{"rows": []}', "it holds: none"),
                (b'{"rows": [{"preset": 3}]}', "a row lacks preset"),
                (json.dumps({"rows": [{**row, "tops": 0}]}).encode(), "must be above 0"),
                (json.dumps({"rows": [{**row, "seq": -5}]}).encode(), "must be above 0"),
                (json.dumps({"rows": [{**row, "error": "no"}]}).encode(), "it holds: none"),
                (json.dumps({"rows": [row]}).encode(), "holds no rows of exact")):
            with self.subTest(content=content):
                path = self.write("bad.json", content)
                self.assertIn(message, self.call("estimate", *share, path, code=FILE)[1])
        self.assertIn("nowhere.json: cannot be read",
                      self.call("estimate", *share, "nowhere.json", code=FILE)[1])


class Document(CliTest):
    def test_assess(self):
        """What docs/assess.md shows is what the program prints."""
        with open(os.path.join(ROOT, "docs", "assess.md"), encoding="utf-8") as file:
            text = file.read()
        blocks = [block.split("```")[0] for block in text.split("```text\n")[1:]]
        estimate = next(line for line in text.splitlines() if line.startswith("sageattn estimate"))
        shown = {"assess examples/data/smollm2-135m.safetensors": blocks[0],
                 estimate.removeprefix("sageattn "): blocks[1]}
        for command, block in shown.items():
            with self.subTest(command):
                self.assertEqual(self.call(*command.split(), cwd=ROOT)[0], block)


class Errors(CliTest):
    def run_flags(self, *flags, code, shapes=((1, 4, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8))):
        qkv = self.write_qkv(*(noise(i, shape) for i, shape in enumerate(shapes)))
        _, stderr = self.call("run", *qkv, "--out=out.npy", *flags, code=code)
        self.assertFalse(os.path.exists(self.path("out.npy")))
        return stderr

    def test_usage(self):
        for arguments in ([], ["fly"], ["run"], ["run", "--q=a.npy"], ["compare", "a.npy"],
                          ["info", "--arch=many"], ["info", "--colour"]):
            with self.subTest(arguments=arguments):
                self.call(*arguments, code=USAGE)

    def test_an_unknown_command_lists_the_known_ones(self):
        known = "the commands are run, compare, demo, compile, bench, assess, estimate, info, selftest\n"
        _, stderr = self.call("fly", "--json", code=USAGE)
        self.assertIn(f"unknown command 'fly'; {known}", stderr)
        _, stderr = self.call(code=USAGE)
        self.assertIn(f"a command is required; {known}", stderr)

    def test_an_unknown_value_lists_the_legal_ones(self):
        stderr = self.run_flags("--qk-format=i9", code=USAGE)
        self.assertIn("--qk-format: unknown value 'i9'; it takes auto, i8, i4, none, e4m3", stderr)
        stderr = self.run_flags("--preset=sage3", code=USAGE)
        self.assertIn("sage2_8b", stderr)

    def test_conflicting_options(self):
        self.write("cu.npy", Tensor("I32", (2,), (0, 4)))
        stderr = self.run_flags("--cu-seqlens-q=cu.npy", code=USAGE)
        self.assertIn("--cu-seqlens-kv", stderr)
        stderr = self.run_flags("--window-left=3", code=LIBRARY)
        self.assertIn("window_left", stderr)
        self.assertIn("SAGEATTN_E_INVALID_ARGUMENT", stderr)
        self.run_flags("--preset=exact", "--smooth-k=on", code=LIBRARY)
        self.run_flags("--pv-accum=single_level", "--promotion-interval=64", code=LIBRARY)

    def test_library_limits(self):
        self.assertIn("64", self.run_flags("--arch=64", code=LIBRARY))
        self.run_flags("--threads=-1", code=LIBRARY)
        self.assertIn("num_threads = 4",
                      self.run_flags("--backend=cuda", "--threads=4", code=LIBRARY))
        self.run_flags("--sm-scale=inf", code=LIBRARY)
        self.run_flags(shapes=((1, 4, 2, 300), (1, 6, 2, 300), (1, 6, 2, 300)), code=LIBRARY)

    def test_shapes(self):
        for shapes, message in (
                (((4, 8), (6, 8), (6, 8)), "q has shape [4, 8]"),
                (((2, 4, 2, 8), (1, 6, 2, 8), (1, 6, 2, 8)), "batch"),
                (((1, 4, 2, 8), (1, 6, 2, 8), (1, 5, 2, 8)), "tokens"),
                (((1, 4, 2, 8), (1, 6, 2, 8), (1, 6, 1, 8)), "heads"),
                (((1, 4, 3, 8), (1, 6, 2, 8), (1, 6, 2, 8)), "not a multiple"),
                (((1, 4, 2, 4), (1, 6, 2, 8), (1, 6, 2, 8)), "channels")):
            with self.subTest(message):
                self.assertIn(message, self.run_flags(shapes=shapes, code=FILE))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
