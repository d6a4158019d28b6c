// Attention on a GPU: on a stream, then replayed from a CUDA graph, both held against the CPU backend.
// Exits with 77 where there is no GPU.
package main

import (
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand"
	"os"
	"runtime"

	"sageattn"
)

const tokens, heads, dim = 1000, 8, 128

func main() {
	log.SetFlags(0)
	runtime.LockOSThread() // the driver's current context belongs to a thread
	if err := openDriver(); err != nil {
		skip(err)
	}
	q, k, v := normal(), normal(), normal() // bfloat16, as bits
	out, cpuOut := make([]uint16, len(q)), make([]uint16, len(q))
	lse, cpuLSE := make([]float32, heads*tokens), make([]float32, heads*tokens)

	plan, err := newPlan(sageattn.BackendCUDA)
	if errors.Is(err, sageattn.ErrNoDevice) || errors.Is(err, sageattn.ErrDriverTooOld) {
		skip(err)
	}
	check(err)
	defer plan.Close()
	info, stream := plan.Info(), newStream()
	args := sageattn.DeviceArgs{
		Batch: 1, QoLen: tokens, KVLen: tokens, Stream: stream,
		Q: sageattn.DeviceTensor{Address: upload(q)}, K: sageattn.DeviceTensor{Address: upload(k)},
		V: sageattn.DeviceTensor{Address: upload(v)}, Out: sageattn.DeviceTensor{Address: upload(out)},
		LSE:       allocate(4 * len(lse)),
		Workspace: allocate(int(info.MinWorkspace)), WorkspaceSize: info.MinWorkspace,
	}
	check(plan.ExecuteDevice(args))
	synchronize(stream) // until here the memory must stay
	download(out, args.Out.Address)
	download(lse, args.LSE)

	cpu, err := newPlan(sageattn.BackendCPU)
	check(err)
	defer cpu.Close()
	check(cpu.Execute(sageattn.Args{
		Batch: 1, QoLen: tokens, KVLen: tokens,
		Q: sageattn.BFloat16s(q), K: sageattn.BFloat16s(k), V: sageattn.BFloat16s(v),
		Out: sageattn.BFloat16s(cpuOut), LSE: cpuLSE,
	}))
	result, err := sageattn.Compare(sageattn.CompareArgs{Batch: 1, Len: tokens, NumHeads: heads, HeadDim: dim,
		Out: sageattn.BFloat16s(out), Ref: sageattn.BFloat16s(cpuOut)})
	check(err)
	lseError := 0.0
	for i := range lse {
		lseError = math.Max(lseError, math.Abs(float64(lse[i]-cpuLSE[i])))
	}
	fmt.Printf("%s on sm_%d against %s: rel_error %.5f, lse error %.5f\n", info.KernelName, info.Arch,
		cpu.Info().KernelName, result.RelError, lseError)
	if result.NonfiniteOut != 0 || !(result.RelError < 0.02) || !(lseError < 0.01) {
		log.Fatal("the GPU and the CPU disagree")
	}

	graph := capture(stream, func() { check(plan.ExecuteDevice(args)) })
	again := make([]uint16, len(out))
	copyTo(args.Out.Address, again) // zeros, lest the graph be seen to do nothing
	launch(graph, stream)
	synchronize(stream)
	download(again, args.Out.Address)
	for i := range out {
		if again[i] != out[i] {
			log.Fatalf("the graph's element %d is %#x, but was %#x", i, again[i], out[i])
		}
	}
	fmt.Println("replayed from a graph: the same bits")
	for _, address := range []uintptr{args.Q.Address, args.K.Address, args.V.Address, args.Out.Address,
		args.LSE, args.Workspace} {
		free(address)
	}
}

func newPlan(backend sageattn.Backend) (*sageattn.Plan, error) {
	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: backend})
	if err != nil {
		return nil, err
	}
	defer context.Close() // a plan keeps what it needs of it
	desc, err := sageattn.NewAttnDesc(sageattn.PresetSage2_8B)
	check(err)
	desc.QDType = sageattn.BF16
	desc.Mask = sageattn.MaskCausalBottomRight
	desc.HeadDim, desc.NumQoHeads = dim, heads
	desc.MaxQoLen, desc.MaxKVLen = tokens, tokens
	return context.NewPlan(desc)
}

var source = rand.New(rand.NewSource(1))

func normal() []uint16 {
	x := make([]uint16, tokens*heads*dim)
	for i := range x {
		x[i] = uint16(math.Float32bits(float32(source.NormFloat64())) >> 16)
	}
	return x
}

func skip(err error) {
	fmt.Println("skipped:", err)
	os.Exit(77)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
