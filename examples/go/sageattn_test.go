// SPDX-License-Identifier: Apache-2.0

package sageattn_test

import (
	"errors"
	"math"
	"math/rand"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sageattn"
)

func newContext(t *testing.T) *sageattn.Context {
	t.Helper()
	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU, NumThreads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(context.Close)
	return context
}

func newDesc(t *testing.T, preset sageattn.Preset, heads, dim, limit int32) sageattn.AttnDesc {
	t.Helper()
	desc, err := sageattn.NewAttnDesc(preset)
	if err != nil {
		t.Fatal(err)
	}
	desc.QDType = sageattn.F32
	desc.HeadDim, desc.NumQoHeads = dim, heads
	desc.MaxQoLen, desc.MaxKVLen = limit, limit
	return desc
}

func newPlan(t *testing.T, context *sageattn.Context, desc sageattn.AttnDesc) *sageattn.Plan {
	t.Helper()
	plan, err := context.NewPlan(desc)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(plan.Close)
	return plan
}

func normal(seed int64, count int) []float32 {
	source := rand.New(rand.NewSource(seed))
	x := make([]float32, count)
	for i := range x {
		x[i] = float32(source.NormFloat64())
	}
	return x
}

// filled is an output whose every element is wrong until it is written.
func filled(count int) []float32 {
	x := make([]float32, count)
	for i := range x {
		x[i] = 12345
	}
	return x
}

// attention is the plain formula in float64, causal bottom-right, on [token, head, channel].
func attention(q, k, v []float32, qoLen, kvLen, heads, kvHeads, dim int) (out, lse []float32) {
	out, lse = make([]float32, qoLen*heads*dim), make([]float32, heads*qoLen)
	for h := 0; h < heads; h++ {
		g := h / (heads / kvHeads)
		for i := 0; i < qoLen; i++ {
			sum, acc := 0.0, make([]float64, dim)
			for j := 0; j <= i+kvLen-qoLen; j++ {
				s := 0.0
				for c := 0; c < dim; c++ {
					s += float64(q[(i*heads+h)*dim+c]) * float64(k[(j*kvHeads+g)*dim+c])
				}
				p := math.Exp(s / math.Sqrt(float64(dim)))
				sum += p
				for c := range acc {
					acc[c] += p * float64(v[(j*kvHeads+g)*dim+c])
				}
			}
			for c := range acc {
				if sum > 0 { // a query that sees no key gives 0
					out[(i*heads+h)*dim+c] = float32(acc[c] / sum)
				}
			}
			lse[h*qoLen+i] = float32(math.Log(sum))
		}
	}
	return out, lse
}

func maxError(a, b []float32) float64 {
	worst := 0.0
	for i := range a {
		d := math.Abs(float64(a[i]) - float64(b[i]))
		if !(d <= worst) { // NaN too
			worst = d
		}
	}
	return worst
}

func equal(a, b []float32) bool {
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return len(a) == len(b)
}

// wantError fails unless err is an Error of the status whose message holds every word.
func wantError(t *testing.T, err error, status sageattn.Status, words ...string) {
	t.Helper()
	var e *sageattn.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want an Error of %v", err, status)
	}
	if e.Status != status || !errors.Is(err, status) || errors.Is(err, sageattn.OK) || e.Name != status.Error() {
		t.Errorf("got %d (%s), want %d (%s): %s", e.Status, e.Name, status, status.Error(), e.Message)
	}
	for _, word := range words {
		if !strings.Contains(e.Message, word) {
			t.Errorf("the message %q lacks %q", e.Message, word)
		}
	}
}

func TestResult(t *testing.T) {
	const qoLen, kvLen, heads, kvHeads, dim = 37, 75, 4, 2, 64
	q, k, v := normal(1, qoLen*heads*dim), normal(2, kvLen*kvHeads*dim), normal(3, kvLen*kvHeads*dim)
	want, wantLSE := attention(q, k, v, qoLen, kvLen, heads, kvHeads, dim)
	context := newContext(t)
	for _, test := range []struct {
		preset    sageattn.Preset
		tolerance float64
	}{{sageattn.PresetExact, 1e-5}, {sageattn.PresetSage2_8B, 0.1}, {sageattn.PresetSage1, 0.05}} {
		desc := newDesc(t, test.preset, heads, dim, 128)
		desc.NumKVHeads = kvHeads
		desc.Mask = sageattn.MaskCausalBottomRight
		plan := newPlan(t, context, desc)
		out, lse := filled(len(want)), filled(len(wantLSE))
		err := plan.Execute(sageattn.Args{Batch: 1, QoLen: qoLen, KVLen: kvLen, Q: sageattn.Float32s(q),
			K: sageattn.Float32s(k), V: sageattn.Float32s(v), Out: sageattn.Float32s(out), LSE: lse})
		if err != nil {
			t.Fatal(err)
		}
		if e := maxError(out, want); e > test.tolerance {
			t.Errorf("preset %d: out is off by %g", test.preset, e)
		}
		if e := maxError(lse, wantLSE); e > test.tolerance {
			t.Errorf("preset %d: lse is off by %g", test.preset, e)
		}
		result, err := sageattn.Compare(sageattn.CompareArgs{Batch: 1, Len: qoLen, NumHeads: heads,
			HeadDim: dim, Out: sageattn.Float32s(out), Ref: sageattn.Float32s(want)})
		if err != nil {
			t.Fatal(err)
		}
		if e := maxError(out, want); math.Abs(e-result.MaxAbsError) > 1e-6 || result.Count != int64(len(out)) {
			t.Errorf("Compare says %+v, want max_abs_error %g of %d elements", result, e, len(out))
		}
	}
}

// Strides, offsets and C memory must give the bits that plain slices give.
func TestStridesAndBuffers(t *testing.T) {
	const tokens, heads, dim, row = 50, 2, 32, 2 * 32
	plan := newPlan(t, newContext(t), newDesc(t, sageattn.PresetSage2_8B, heads, dim, tokens))
	q, k, v, out := normal(1, tokens*row), normal(2, tokens*row), normal(3, tokens*row), filled(tokens*row)
	args := sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: sageattn.Float32s(q),
		K: sageattn.Float32s(k), V: sageattn.Float32s(v), Out: sageattn.Float32s(out)}
	if err := plan.Execute(args); err != nil {
		t.Fatal(err)
	}

	fused := make([]float32, tokens*4*row) // q, k, v, out as columns of one array
	strides := sageattn.Strides{Token: 4 * row, Head: dim, Dim: 1}
	for i := range q {
		at := i/row*4*row + i%row
		fused[at], fused[at+row], fused[at+2*row] = q[i], k[i], v[i]
	}
	columns := sageattn.Float32s(fused)
	args.Q, args.K = columns.At(0, strides), columns.At(row, strides)
	args.V, args.Out = columns.At(2*row, strides), columns.At(3*row, strides)
	if err := plan.Execute(args); err != nil {
		t.Fatal(err)
	}
	for i := range out {
		if got := fused[i/row*4*row+3*row+i%row]; got != out[i] {
			t.Fatalf("strided element %d is %g, want %g", i, got, out[i])
		}
	}

	buffer, err := sageattn.NewBuffer(4*4*tokens*row, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer buffer.Close()
	all := buffer.Float32s()
	if len(all) != 4*tokens*row || len(buffer.Uint16s()) != 2*len(all) || len(buffer.Int32s()) != len(all) {
		t.Fatal("a buffer's slices have the wrong length")
	}
	n := copy(all, q)
	n += copy(all[n:], k)
	n += copy(all[n:], v)
	strides.Token, strides.Head = -row, dim // backwards: element 0 is the last token
	last := (tokens - 1) * row
	args.Q = sageattn.Float32s(all[:tokens*row]).At(last, strides)
	args.K = sageattn.Float32s(all[tokens*row : 2*tokens*row])
	args.V = sageattn.Float32s(all[2*tokens*row : n])
	args.Out = sageattn.Float32s(all[n:]).At(last, strides)
	if err := plan.Execute(args); err != nil {
		t.Fatal(err)
	}
	if e := maxError(all[n:], out); e > 0.1 { // queries are grouped otherwise, so not the same bits
		t.Errorf("C memory, backwards, is off by %g", e)
	}
	buffer.Close()
	if len(buffer.Float32s()) != 0 {
		t.Error("a closed buffer still has elements")
	}
	_, err = sageattn.NewBuffer(0, 64)
	wantError(t, err, sageattn.ErrInvalidArgument, "size is 0")
	_, err = sageattn.NewBuffer(8, 12)
	wantError(t, err, sageattn.ErrInvalidArgument, "alignment is 12")
}

func TestVarlen(t *testing.T) {
	const heads, dim, row, total = 2, 64, 2 * 64, 30
	desc := newDesc(t, sageattn.PresetExact, heads, dim, 32)
	desc.BatchMode, desc.MaxBatch = sageattn.BatchVarlen, 4
	desc.Mask = sageattn.MaskCausalBottomRight
	plan := newPlan(t, newContext(t), desc)
	q, k, v, out := normal(1, total*row), normal(2, total*row), normal(3, total*row), filled(total*row)
	cu, status := []int32{0, 10, 30, 20}, []int32{7, 7, 7} // the third sequence ends before it starts
	args := sageattn.Args{Batch: 3, TotalQo: total, TotalKV: total, CuSeqlensQ: cu, CuSeqlensKV: cu,
		SeqUsedKV: []int32{6, 20, 0}, Status: status, LSE: filled(heads * total), Q: sageattn.Float32s(q),
		K: sageattn.Float32s(k), V: sageattn.Float32s(v), Out: sageattn.Float32s(out)}
	if err := plan.Execute(args); err != nil {
		t.Fatal(err)
	}
	if status[0] != sageattn.SequenceOK || status[1] != sageattn.SequenceOK ||
		status[2] != sageattn.SequenceBadLengths {
		t.Errorf("status is %v", status)
	}
	for _, cut := range []struct{ first, last, used int }{{0, 10, 6}, {10, 30, 20}} {
		a, b := cut.first*row, cut.last*row
		want, _ := attention(q[a:b], k[a:b], v[a:b], cut.last-cut.first, cut.used, heads, heads, dim)
		if e := maxError(out[a:b], want); e > 1e-5 {
			t.Errorf("tokens %v are off by %g", cut, e)
		}
	}
	for name, change := range map[string]func(*sageattn.Args){
		"CuSeqlensQ":    func(a *sageattn.Args) { a.CuSeqlensQ = cu[:3] },
		"CuSeqlensKV":   func(a *sageattn.Args) { a.CuSeqlensKV = cu[:3] },
		"SeqUsedKV":     func(a *sageattn.Args) { a.SeqUsedKV = cu[:2] },
		"Status":        func(a *sageattn.Args) { a.Status = status[:2] },
		"LSE":           func(a *sageattn.Args) { a.LSE = a.LSE[1:] },
		"cu_seqlens_kv": func(a *sageattn.Args) { a.CuSeqlensKV = nil },
		"qo_len":        func(a *sageattn.Args) { a.QoLen = 1 },
		"TotalQo is -1": func(a *sageattn.Args) { a.TotalQo = -1 },
	} {
		bad := args
		change(&bad)
		wantError(t, plan.Execute(bad), sageattn.ErrInvalidArgument, name)
	}
}

func TestHalf(t *testing.T) {
	const tokens, heads, dim = 20, 2, 16
	context := newContext(t)
	x := make([]uint16, tokens*heads*dim)
	for i := range x {
		x[i] = uint16(math.Float32bits(float32(i%9)-4) >> 16) // exact in bfloat16
	}
	desc := newDesc(t, sageattn.PresetExact, heads, dim, tokens)
	desc.QDType, desc.OutDType = sageattn.BF16, sageattn.F32
	plan := newPlan(t, context, desc)
	out, wide := filled(len(x)), make([]float32, len(x))
	for i := range x {
		wide[i] = math.Float32frombits(uint32(x[i]) << 16)
	}
	b := sageattn.BFloat16s(x)
	args := sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: b, K: b, V: b, Out: sageattn.Float32s(out)}
	if err := plan.Execute(args); err != nil {
		t.Fatal(err)
	}
	desc.QDType = sageattn.F32
	want, f := filled(len(x)), sageattn.Float32s(wide)
	full := sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: f, K: f, V: f, Out: sageattn.Float32s(want)}
	if err := newPlan(t, context, desc).Execute(full); err != nil {
		t.Fatal(err)
	}
	if e := maxError(out, want); e > 1e-5 {
		t.Errorf("bfloat16 is off by %g", e)
	}
	again := filled(len(x))
	args.Q = sageattn.BFloat16s(append([]uint16{1, 2, 3}, x...)) // the tensor begins with the fourth
	args.Q.Offset, args.Out = 3, sageattn.Float32s(again)
	if err := plan.Execute(args); err != nil || !equal(again, out) {
		t.Errorf("an offset in halves gives another result (%v)", err)
	}
	args.K = sageattn.Float16s(x)
	wantError(t, plan.Execute(args), sageattn.ErrInvalidArgument, "K holds F16", "BF16")
	args.K, args.Out = b, sageattn.BFloat16s(make([]uint16, len(x)))
	wantError(t, plan.Execute(args), sageattn.ErrInvalidArgument, "Out holds BF16", "F32")
}

// C would read and write beyond a slice that is too short.
func TestBounds(t *testing.T) {
	const tokens, heads, dim, row = 8, 2, 16, 2 * 16
	plan := newPlan(t, newContext(t), newDesc(t, sageattn.PresetExact, heads, dim, tokens))
	x := sageattn.Float32s(normal(1, tokens*row))
	strides := sageattn.Strides{Token: row, Head: dim, Dim: 1}
	good := sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: x, K: x, V: x,
		Out: sageattn.Float32s(filled(tokens * row)), LSE: filled(heads * tokens)}
	if err := plan.Execute(good); err != nil {
		t.Fatal(err)
	}
	short := sageattn.Float32s(normal(1, tokens*row-1))
	wide, huge, back := strides, strides, strides
	wide.Token++
	huge.Token = math.MaxInt64
	back.Token = -row
	for _, test := range []struct {
		word   string
		change func(*sageattn.Args)
	}{
		{"Q: sizes [1 8 2 16]", func(a *sageattn.Args) { a.Q = short }},
		{"K: sizes", func(a *sageattn.Args) { a.K = short }},
		{"V: sizes", func(a *sageattn.Args) { a.V = sageattn.Tensor{} }},
		{"Out: sizes", func(a *sageattn.Args) { a.Out = short }},
		{"to 255 of the slice, which has 255", func(a *sageattn.Args) { a.Q = short.At(0, strides) }},
		{"to 262 of", func(a *sageattn.Args) { a.K = x.At(0, wide) }},
		{"to 9223372036854775807 of", func(a *sageattn.Args) { a.K = x.At(0, huge) }},
		{"from index -224 to", func(a *sageattn.Args) { a.Q = x.At(0, back) }},
		{"from index 1 to 256", func(a *sageattn.Args) { a.Q = x.At(1, sageattn.Strides{}) }},
		{"Offset is -1", func(a *sageattn.Args) { a.Q = x.At(-1, strides) }},
		{"Offset is 257", func(a *sageattn.Args) { a.Q = x.At(257, strides) }},
		{"LSE: sizes", func(a *sageattn.Args) { a.LSE = a.LSE[1:] }},
		{"LSE: sizes", func(a *sageattn.Args) { a.LSE = []float32{} }},
		{"LSE: sizes", func(a *sageattn.Args) { a.LSEStrides = sageattn.LSEStrides{Head: 1, Token: 3} }},
		{"Batch is -1", func(a *sageattn.Args) { a.Batch = -1 }},
		{"QoLen is 4294967304", func(a *sageattn.Args) { a.QoLen += 1 << 32 }}, // 8 if it were cut
		{"Q: sizes", func(a *sageattn.Args) { a.Batch, a.QoLen = math.MaxInt32, math.MaxInt32 }},
	} {
		bad := good
		test.change(&bad)
		wantError(t, plan.Execute(bad), sageattn.ErrInvalidArgument, "Plan.Execute", test.word)
	}
	_, err := sageattn.Compare(sageattn.CompareArgs{Batch: 1, Len: 8, NumHeads: heads, HeadDim: dim, Out: x, Ref: short})
	wantError(t, err, sageattn.ErrInvalidArgument, "Compare: Ref")

	empty := sageattn.Args{Batch: 0, QoLen: tokens, KVLen: tokens, Status: []int32{}}
	if err := plan.Execute(empty); err != nil {
		t.Errorf("an empty batch: %v", err)
	}
}

func TestErrors(t *testing.T) {
	context := newContext(t)
	desc := newDesc(t, sageattn.PresetSage2_8B, 2, 64, 16)
	bad := desc
	bad.HeadDim = 257
	_, err := context.NewPlan(bad)
	wantError(t, err, sageattn.ErrInvalidArgument, "sageattn_plan_create", "head_dim", "257", "256")
	_, err = context.Query(bad)
	wantError(t, err, sageattn.ErrInvalidArgument, "sageattn_plan_query", "257")
	_, err = sageattn.NewAttnDesc(99)
	wantError(t, err, sageattn.ErrInvalidArgument, "preset", "99")
	_, err = sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU, Device: 3})
	wantError(t, err, sageattn.ErrInvalidArgument, "device", "3")
	_, err = sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU, CacheDir: "a\x00b"})
	wantError(t, err, sageattn.ErrInvalidArgument, "cache_dir", "NUL")
	wantError(t, context.ImportBlob([]byte("blob")), sageattn.ErrUnsupported, "sageattn_context_import_blob")
	_, err = context.ExportBlob()
	wantError(t, err, sageattn.ErrUnsupported, "sageattn_context_export_blob")

	plan := newPlan(t, context, desc)
	x := sageattn.Float32s(normal(1, 17*2*64))
	args := sageattn.Args{Batch: 1, QoLen: 17, KVLen: 16, Q: x, K: x, V: x, Out: sageattn.Float32s(filled(17 * 2 * 64))}
	wantError(t, plan.Execute(args), sageattn.ErrLimit, "qo_len", "17", "16")
	args.QoLen, args.Out = 16, x
	wantError(t, plan.Execute(args), sageattn.ErrAliased, "out")
	_, err = plan.Kernel(0)
	wantError(t, err, sageattn.ErrInvalidArgument, "index")
	_, err = plan.ExportBlob()
	wantError(t, err, sageattn.ErrUnsupported)
	wantError(t, plan.ExecuteDevice(sageattn.DeviceArgs{}), sageattn.ErrInvalidArgument, "use Execute")
}

func TestInfo(t *testing.T) {
	context := newContext(t)
	desc := newDesc(t, sageattn.PresetSage2_8B, 4, 64, 128)
	desc.NumKVHeads, desc.HeadDimV, desc.SMScaleSet, desc.SMScale = 2, 32, true, 0.5
	info := newPlan(t, context, desc).Info()
	query, err := context.Query(desc)
	if err != nil || query != info {
		t.Errorf("Query says %+v (%v), the plan %+v", query, err, info)
	}
	if info.Backend != sageattn.BackendCPU || info.Arch != 90 || info.Origin != sageattn.OriginBuiltin ||
		info.NumKVHeads != 2 || info.HeadDimV != 32 || info.SMScale != 0.5 || info.QDType != sageattn.F32 ||
		info.OutDType != sageattn.F32 || info.QKFormat != sageattn.QKI8 || info.PVFormat != sageattn.PVE4M3 ||
		info.SmoothK != sageattn.SmoothOn || info.SmoothV != sageattn.SmoothVGroup ||
		info.KernelName != "cpu_wgmma_i8_e4m3" || info.MinWorkspace <= 0 || info.WorkspaceAlignment <= 0 {
		t.Errorf("the plan's info is %+v", info)
	}
	for preset := sageattn.PresetAuto; preset <= sageattn.PresetExact; preset++ {
		if _, err := sageattn.NewAttnDesc(preset); err != nil { // which checks that no field is lost
			t.Error(err)
		}
	}
	report, err := context.Report()
	if err != nil || !strings.Contains(report, "backend") || strings.Contains(report, "\x00") {
		t.Errorf("the report is %q (%v)", report, err)
	}
	if v := sageattn.Version(); !strings.Contains(v, ".") || len(sageattn.SourceID()) != 64 {
		t.Errorf("version %q, source id %q", v, sageattn.SourceID())
	}
}

func TestSelfTestLogs(t *testing.T) {
	var mu sync.Mutex
	lines := 0
	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU,
		Log: func(level sageattn.LogLevel, message string) {
			mu.Lock()
			defer mu.Unlock()
			if message != "" && level == sageattn.LogInfo {
				lines++
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer context.Close()
	if err := context.SelfTest(); err != nil {
		t.Error(err)
	}
	if lines == 0 {
		t.Error("nothing was logged")
	}
}

func TestConcurrency(t *testing.T) {
	const workers, tokens, heads, dim = 8, 40, 2, 64
	context := newContext(t)
	desc := newDesc(t, sageattn.PresetSage2_8B, heads, dim, tokens)
	plan := newPlan(t, context, desc)
	run := func(seed int64, workspace *sageattn.Workspace) ([]float32, error) {
		x, out := sageattn.Float32s(normal(seed, tokens*heads*dim)), filled(tokens*heads*dim)
		return out, plan.Execute(sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: x, K: x, V: x,
			Out: sageattn.Float32s(out), Workspace: workspace})
	}
	var wants [workers][]float32
	for w := range wants {
		var err error
		if wants[w], err = run(int64(w), nil); err != nil {
			t.Fatal(err)
		}
	}
	var group sync.WaitGroup
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			workspace, err := plan.NewWorkspace()
			if err != nil {
				t.Error(err)
				return
			}
			for i := 0; i < 10; i++ {
				own := workspace // of its own, or of the pool
				if i%2 == 0 {
					own = nil
				}
				if got, err := run(int64(w), own); err != nil || !equal(got, wants[w]) {
					t.Errorf("goroutine %d, round %d: a wrong result (%v)", w, i, err)
				}
				if i%4 == 0 {
					runtime.GC() // empties the pool and moves stacks
				}
				bad := desc
				bad.HeadDim = int32(1000 + w)
				if _, err := context.Query(bad); err == nil ||
					!strings.Contains(err.Error(), string(rune('0'+w))) {
					t.Errorf("goroutine %d got the error of another: %v", w, err)
				}
			}
			if err := workspace.Close(); err != nil {
				t.Error(err)
			}
		}(w)
	}
	group.Wait()
}

// A workspace in use is refused, whoever comes second.
func TestSharedWorkspace(t *testing.T) {
	const workers, tokens, heads, dim = 4, 200, 2, 64
	plan := newPlan(t, newContext(t), newDesc(t, sageattn.PresetSage2_8B, heads, dim, tokens))
	workspace, err := plan.NewWorkspace()
	if err != nil {
		t.Fatal(err)
	}
	x := sageattn.Float32s(normal(1, tokens*heads*dim))
	var refused, done atomic.Int32
	deadline := time.Now().Add(10 * time.Second)
	var group sync.WaitGroup
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func() {
			defer group.Done()
			out := sageattn.Float32s(filled(tokens * heads * dim))
			for (refused.Load() == 0 || done.Load() == 0) && time.Now().Before(deadline) {
				err := plan.Execute(sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: x, K: x, V: x,
					Out: out, Workspace: workspace})
				if err == nil {
					done.Add(1)
				} else if errors.Is(err, sageattn.ErrWorkspace) {
					refused.Add(1)
				} else {
					t.Error(err)
				}
			}
		}()
	}
	group.Wait()
	if refused.Load() == 0 || done.Load() == 0 {
		t.Errorf("%d executes were done and %d refused", done.Load(), refused.Load())
	}
}

func TestClosed(t *testing.T) {
	const tokens, heads, dim = 64, 2, 64
	context := newContext(t)
	plan := newPlan(t, context, newDesc(t, sageattn.PresetSage2_8B, heads, dim, tokens))
	workspace, err := plan.NewWorkspace()
	if err != nil {
		t.Fatal(err)
	}
	x := sageattn.Float32s(normal(1, tokens*heads*dim))
	run := func(workspace *sageattn.Workspace) error {
		return plan.Execute(sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: x, K: x, V: x,
			Out: sageattn.Float32s(filled(tokens * heads * dim)), Workspace: workspace})
	}
	wantClosed := func(err error, words string) {
		t.Helper()
		if !errors.Is(err, sageattn.ErrClosed) || !strings.Contains(err.Error(), words) {
			t.Errorf("got %v, want ErrClosed with %q", err, words)
		}
	}
	context.Close()
	context.Close()
	_, err = context.NewPlan(sageattn.AttnDesc{})
	wantClosed(err, "Context.NewPlan: the context")
	_, err = context.Query(sageattn.AttnDesc{})
	wantClosed(err, "Context.Query")
	_, err = context.Report()
	wantClosed(err, "Context.Report")
	_, err = context.ExportBlob()
	wantClosed(err, "Context.ExportBlob")
	wantClosed(context.ImportBlob(nil), "Context.ImportBlob")
	wantClosed(context.SelfTest(), "Context.SelfTest")

	if err := run(workspace); err != nil { // a plan outlives its context
		t.Error(err)
	}
	if err := workspace.Close(); err != nil {
		t.Error(err)
	}
	wantClosed(run(workspace), "Plan.Execute: the workspace")

	// Close may come while others execute: each execute is either done or refused.
	var group sync.WaitGroup
	for w := 0; w < 4; w++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				if err := run(nil); err != nil {
					wantClosed(err, "Plan.Execute: the plan")
					return
				}
			}
		}()
	}
	other := newContext(t)
	group.Add(1)
	go func() {
		defer group.Done()
		for {
			if _, err := other.Report(); err != nil {
				wantClosed(err, "Context.Report: the context")
				return
			}
		}
	}()
	runtime.Gosched()
	plan.Close()
	other.Close()
	group.Wait()
	plan.Close()
	wantClosed(plan.ExecuteDevice(sageattn.DeviceArgs{}), "Plan.ExecuteDevice")
	_, err = plan.Kernel(0)
	wantClosed(err, "Plan.Kernel")
	_, err = plan.ExportBlob()
	wantClosed(err, "Plan.ExportBlob")
	if plan.Info().Backend != sageattn.BackendCPU {
		t.Error("a closed plan forgot its info")
	}
}

// Handles that nobody closes are freed when they are collected, and not while a call uses them. The
// threads of the CPU backend tell: a context has them, and each of its plans keeps them.
func TestCollected(t *testing.T) {
	const tokens, heads, dim, threads, contexts = 16, 2, 64, 4, 20
	count := func() int {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Skip("needs Linux: ", err)
		}
		return len(tasks)
	}
	x := sageattn.Float32s(normal(1, tokens*heads*dim))
	before := count()
	for i := 0; i < contexts; i++ {
		context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU,
			NumThreads: threads, Log: func(sageattn.LogLevel, string) {}})
		if err != nil {
			t.Fatal(err)
		}
		plan, err := context.NewPlan(newDesc(t, sageattn.PresetSage2_8B, heads, dim, tokens))
		if err != nil {
			t.Fatal(err)
		}
		go runtime.GC()
		err = plan.Execute(sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens, Q: x, K: x, V: x,
			Out: sageattn.Float32s(filled(tokens * heads * dim))})
		if err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for count() >= before+contexts*(threads-1)/2 { // the last one may still be seen on the stack
		if time.Now().After(deadline) {
			t.Fatalf("%d threads before, %d after %d contexts that nobody holds", before, count(), contexts)
		}
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
	}
}

// Every field of a desc reaches the library, which names it when it refuses its value.
func TestDescFields(t *testing.T) {
	context := newContext(t)
	good := newDesc(t, sageattn.PresetAuto, 2, 64, 16)
	fields := reflect.TypeOf(good)
	for i := 0; i < fields.NumField(); i++ {
		desc, name := good, fields.Field(i).Name
		field := reflect.ValueOf(&desc).Elem().Field(i)
		switch field.Kind() {
		case reflect.Int32, reflect.Int64:
			field.SetInt(-77)
		case reflect.Float32:
			field.SetFloat(-77)
		case reflect.Bool: // SMScaleSet: the scale is then 0
			desc.SMScaleSet = true
			if info, err := context.Query(desc); err != nil || info.SMScale != 0 {
				t.Errorf("SMScaleSet gives the scale %g (%v)", info.SMScale, err)
			}
			continue
		}
		_, err := context.Query(desc)
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), "_", ""), strings.ToLower(name)) {
			t.Errorf("%s = -77 gives %v", name, err)
		}
	}
}

// With a driver that launches nothing: that each address arrives where it belongs shows in the errors.
func TestDevice(t *testing.T) {
	if os.Getenv("SAGEATTN_TEST_FAKES") == "" {
		t.Skip("SAGEATTN_TEST_FAKES does not say where the fake driver is")
	}
	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCUDA,
		Flags: sageattn.NoDiskCache})
	if err != nil {
		t.Fatal(err)
	}
	defer context.Close()
	desc := newDesc(t, sageattn.PresetSage2_8B, 2, 64, 16)
	desc.QDType, desc.BatchMode, desc.MaxBatch = sageattn.BF16, sageattn.BatchVarlen, 2
	plan := newPlan(t, context, desc)
	info := plan.Info()
	good := sageattn.DeviceArgs{Batch: 1, TotalQo: 16, TotalKV: 16,
		Q: sageattn.DeviceTensor{Address: 0x100000}, K: sageattn.DeviceTensor{Address: 0x200000},
		V: sageattn.DeviceTensor{Address: 0x300000}, Out: sageattn.DeviceTensor{Address: 0x400000},
		LSE: 0x500000, CuSeqlensQ: 0x600000, CuSeqlensKV: 0x700000, SeqUsedKV: 0x800000, Status: 0x900000,
		Workspace: 0x10000000, WorkspaceSize: info.MinWorkspace}
	for _, test := range []struct {
		status sageattn.Status
		word   string
		change func(*sageattn.DeviceArgs)
	}{
		{sageattn.ErrMisaligned, "q.data = 0x100001", func(a *sageattn.DeviceArgs) { a.Q.Address++ }},
		{sageattn.ErrMisaligned, "k.data = 0x200001", func(a *sageattn.DeviceArgs) { a.K.Address++ }},
		{sageattn.ErrMisaligned, "v.data = 0x300001", func(a *sageattn.DeviceArgs) { a.V.Address++ }},
		{sageattn.ErrMisaligned, "out.data = 0x400001", func(a *sageattn.DeviceArgs) { a.Out.Address++ }},
		{sageattn.ErrMisaligned, "lse.data = 0x500001", func(a *sageattn.DeviceArgs) { a.LSE++ }},
		{sageattn.ErrMisaligned, "cu_seqlens_q = 0x600001", func(a *sageattn.DeviceArgs) { a.CuSeqlensQ++ }},
		{sageattn.ErrMisaligned, "cu_seqlens_kv = 0x700001", func(a *sageattn.DeviceArgs) { a.CuSeqlensKV++ }},
		{sageattn.ErrMisaligned, "seqused_kv = 0x800001", func(a *sageattn.DeviceArgs) { a.SeqUsedKV++ }},
		{sageattn.ErrMisaligned, "status = 0x900001", func(a *sageattn.DeviceArgs) { a.Status++ }},
		{sageattn.ErrWorkspace, "0x10000001", func(a *sageattn.DeviceArgs) { a.Workspace++ }},
		{sageattn.ErrWorkspace, "workspace_size", func(a *sageattn.DeviceArgs) { a.WorkspaceSize-- }},
		{sageattn.ErrInvalidArgument, "WorkspaceSize is -1", func(a *sageattn.DeviceArgs) { a.WorkspaceSize = -1 }},
		{sageattn.ErrLimit, "total_qo", func(a *sageattn.DeviceArgs) { a.TotalQo = 33 }},
		{sageattn.ErrLimit, "batch", func(a *sageattn.DeviceArgs) { a.Batch = 3 }},
		{sageattn.ErrAliased, "out", func(a *sageattn.DeviceArgs) { a.Out = a.Q }},
	} {
		bad := good
		test.change(&bad)
		wantError(t, plan.ExecuteDevice(bad), test.status, test.word)
	}
	wantError(t, plan.Execute(sageattn.Args{}), sageattn.ErrInvalidArgument, "use ExecuteDevice")
	_, err = plan.NewWorkspace()
	wantError(t, err, sageattn.ErrInvalidArgument, "DeviceArgs")

	if info.Backend != sageattn.BackendCUDA || info.NumKernels < 1 {
		t.Fatalf("the plan's info is %+v", info)
	}
	kernel, err := plan.Kernel(info.NumKernels - 1)
	if err != nil || !strings.HasPrefix(info.KernelName, kernel.Name) || kernel.Threads != info.Threads ||
		kernel.Arch != info.Arch || kernel.Origin != sageattn.OriginCompiled {
		t.Errorf("the last kernel is %+v (%v), the plan %+v", kernel, err, info)
	}
	blob, err := plan.ExportBlob()
	if err != nil || len(blob) == 0 {
		t.Fatalf("a blob of %d bytes (%v)", len(blob), err)
	}
	all, err := context.ExportBlob()
	if err != nil || len(all) != len(blob) {
		t.Errorf("the context exports %d bytes (%v), its only plan %d", len(all), err, len(blob))
	}
	other, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCUDA,
		Flags: sageattn.NoDiskCache | sageattn.NoJIT})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	_, err = other.NewPlan(desc)
	wantError(t, err, sageattn.ErrKernelMissing)
	wantError(t, other.ImportBlob(blob[1:]), sageattn.ErrBadBlob)
	if err := other.ImportBlob(blob); err != nil {
		t.Fatal(err)
	}
	if origin := newPlan(t, other, desc).Info().Origin; origin != sageattn.OriginBlob {
		t.Errorf("the origin is %d, want %d", origin, sageattn.OriginBlob)
	}
}
