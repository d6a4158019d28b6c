// SPDX-License-Identifier: Apache-2.0

package sageattn

// #include "shim.h"
import "C"

import "unsafe"

// Args are the lengths and tensors of one Execute.
type Args struct {
	Batch   int   // sequences
	QoLen   int   // BatchDense: queries of each sequence. BatchVarlen: 0
	KVLen   int   // BatchDense: keys of each sequence. BatchVarlen: 0
	TotalQo int64 // BatchVarlen: tokens in Q and Out. BatchDense: 0
	TotalKV int64 // BatchVarlen: tokens in K and V. BatchDense: 0

	Q, K, V, Out Tensor
	LSE          []float32 // nil: not wanted
	LSEStrides   LSEStrides

	CuSeqlensQ  []int32 // BatchVarlen: Batch + 1 entries. BatchDense: nil
	CuSeqlensKV []int32 // likewise
	SeqUsedKV   []int32 // nil, or Batch entries: keys of each sequence that exist
	Status      []int32 // nil, or Batch entries: receives SequenceOK or SequenceBadLengths of each

	Workspace *Workspace // nil: one of the plan's pool
}

// Execute computes attention on the CPU backend and returns when the result is there. Slices that
// are shorter than the lengths say are an error, and so is a type that is not the plan's. Any number
// of goroutines may execute one plan at once.
func (p *Plan) Execute(args Args) error {
	const function = "Plan.Execute"
	release, err := p.use("Execute")
	if err != nil {
		return err
	}
	defer release()
	if p.info.Backend != BackendCPU {
		return newError(ErrInvalidArgument, "%s: the plan's backend is CUDA, which does not reach the memory "+
			"of slices: use ExecuteDevice, or a context with BackendCPU", function)
	}
	shape, err := p.shape(function, args.Batch, args.QoLen, args.KVLen, args.TotalQo, args.TotalKV)
	if err != nil {
		return err
	}
	setStrides(&shape, args.Q.Strides, args.K.Strides, args.V.Strides, args.Out.Strides, args.LSEStrides)

	batch, qoTokens, kvTokens := args.Batch, args.QoLen, args.KVLen
	if p.desc.BatchMode == BatchVarlen {
		batch, qoTokens, kvTokens = 1, int(args.TotalQo), int(args.TotalKV)
	}
	qoHeads, kvHeads := int(p.desc.NumQoHeads), int(p.info.NumKVHeads)
	dim, dimV := int(p.desc.HeadDim), int(p.info.HeadDimV)
	var pointers [4]unsafe.Pointer
	for i, tensor := range []struct {
		name  string
		t     *Tensor
		dtype DType
		sizes [4]int
	}{
		{"Q", &args.Q, p.info.QDType, [4]int{batch, qoTokens, qoHeads, dim}},
		{"K", &args.K, p.info.KVDType, [4]int{batch, kvTokens, kvHeads, dim}},
		{"V", &args.V, p.info.KVDType, [4]int{batch, kvTokens, kvHeads, dimV}},
		{"Out", &args.Out, p.info.OutDType, [4]int{batch, qoTokens, qoHeads, dimV}},
	} {
		if tensor.t.data != nil && tensor.t.dtype != tensor.dtype {
			return newError(ErrInvalidArgument, "%s: %s holds %s, but the plan's type is %s", function,
				tensor.name, tensor.t.dtype, tensor.dtype)
		}
		if pointers[i], err = tensor.t.locate(function, tensor.name, tensor.sizes); err != nil {
			return err
		}
	}
	if args.LSE != nil {
		s := args.LSEStrides
		err := checkReach(function, "LSE", []int{batch, qoHeads, qoTokens},
			[]int64{s.Batch, s.Head, s.Token}, 0, len(args.LSE))
		if err != nil {
			return err
		}
	}
	for _, array := range []struct {
		name   string
		values []int32
		need   int
	}{
		{"CuSeqlensQ", args.CuSeqlensQ, args.Batch + 1},
		{"CuSeqlensKV", args.CuSeqlensKV, args.Batch + 1},
		{"SeqUsedKV", args.SeqUsedKV, args.Batch},
		{"Status", args.Status, args.Batch},
	} {
		if array.values != nil && len(array.values) < array.need {
			return newError(ErrInvalidArgument, "%s: %s has %d entries, but with Batch %d must have %d",
				function, array.name, len(array.values), args.Batch, array.need)
		}
	}

	workspace := args.Workspace
	if workspace == nil {
		workspace, _ = p.workspaces.Get().(*Workspace)
		if workspace == nil {
			if workspace, err = p.NewWorkspace(); err != nil {
				return err
			}
		}
		defer p.workspaces.Put(workspace)
	}
	if err := workspace.acquire(function); err != nil {
		return err
	}
	defer workspace.release()

	r := newResult()
	return r.err(C.sageattn_go_execute(p.handle, &shape, pointers[0], pointers[1], pointers[2],
		pointers[3], (*C.float)(address(args.LSE)), ints(args.CuSeqlensQ), ints(args.CuSeqlensKV),
		ints(args.SeqUsedKV), ints(args.Status), workspace.buffer.data,
		C.size_t(workspace.buffer.size), &r.c))
}

// A DeviceTensor is a tensor in a device's memory.
type DeviceTensor struct {
	Address uintptr // a CUdeviceptr
	Strides Strides
}

// DeviceArgs are the lengths and device memory of one ExecuteDevice. Every uintptr is an address on
// the device, which must stay allocated until the work that was enqueued has run.
type DeviceArgs struct {
	Batch, QoLen, KVLen int
	TotalQo, TotalKV    int64

	Q, K, V, Out DeviceTensor
	LSE          uintptr // 0: not wanted
	LSEStrides   LSEStrides

	CuSeqlensQ, CuSeqlensKV, SeqUsedKV, Status uintptr

	Workspace     uintptr // aligned to Info().WorkspaceAlignment; one for each execute in flight
	WorkspaceSize int64   // Info().MinWorkspace or more
	Stream        uintptr // a CUstream or cudaStream_t; 0: the default stream
}

// ExecuteDevice enqueues attention on a GPU and does not wait for it, so it can be captured in a
// CUDA graph. It cannot see how large device memory is: sizes are the caller's promise.
func (p *Plan) ExecuteDevice(args DeviceArgs) error {
	const function = "Plan.ExecuteDevice"
	release, err := p.use("ExecuteDevice")
	if err != nil {
		return err
	}
	defer release()
	if p.info.Backend != BackendCUDA {
		return newError(ErrInvalidArgument, "%s: the plan's backend is the CPU, which does not reach a device's "+
			"memory: use Execute, or a context with BackendCUDA", function)
	}
	shape, err := p.shape(function, args.Batch, args.QoLen, args.KVLen, args.TotalQo, args.TotalKV)
	if err != nil {
		return err
	}
	if args.WorkspaceSize < 0 {
		return newError(ErrInvalidArgument, "%s: WorkspaceSize is %d, but must not be negative", function,
			args.WorkspaceSize)
	}
	setStrides(&shape, args.Q.Strides, args.K.Strides, args.V.Strides, args.Out.Strides, args.LSEStrides)
	r := newResult()
	return r.err(C.sageattn_go_execute_device(p.handle, &shape, C.uintptr_t(args.Q.Address),
		C.uintptr_t(args.K.Address), C.uintptr_t(args.V.Address), C.uintptr_t(args.Out.Address), C.uintptr_t(args.LSE),
		C.uintptr_t(args.CuSeqlensQ), C.uintptr_t(args.CuSeqlensKV), C.uintptr_t(args.SeqUsedKV),
		C.uintptr_t(args.Status), C.uintptr_t(args.Workspace), C.size_t(args.WorkspaceSize),
		C.uintptr_t(args.Stream), &r.c))
}

// shape is the part of the arguments that are lengths. Those that do not belong to the plan's batch
// mode, or are beyond its limits, are for the library to refuse.
func (p *Plan) shape(function string, batch, qoLen, kvLen int, totalQo, totalKV int64) (
	shape C.sageattn_execute_args, err error) {
	shape.struct_size = C.uint32_t(unsafe.Sizeof(shape))
	shape.total_qo, shape.total_kv = C.int64_t(totalQo), C.int64_t(totalKV)
	for _, field := range []struct {
		name  string
		value int
		to    *C.int32_t
	}{{"Batch", batch, &shape.batch}, {"QoLen", qoLen, &shape.qo_len}, {"KVLen", kvLen, &shape.kv_len}} {
		if err = setLength(function, field.name, field.value, field.to); err != nil {
			return shape, err
		}
	}
	for _, total := range []struct {
		name  string
		value int64
	}{{"TotalQo", totalQo}, {"TotalKV", totalKV}} {
		if total.value < 0 {
			return shape, newError(ErrInvalidArgument, "%s: %s is %d, but must not be negative", function,
				total.name, total.value)
		}
	}
	return shape, nil
}

func setStrides(shape *C.sageattn_execute_args, q, k, v, out Strides, lse LSEStrides) {
	shape.q = C.sageattn_const_tensor(q.c())
	shape.k = C.sageattn_const_tensor(k.c())
	shape.v = C.sageattn_const_tensor(v.c())
	shape.out = out.c()
	shape.lse = lse.c()
}

// ints is a slice as C takes it.
func ints(s []int32) *C.int32_t { return (*C.int32_t)(address(s)) }
