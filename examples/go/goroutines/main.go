// One plan, eight goroutines: a plan is immutable, and each call takes a workspace of its own.
package main

import (
	"fmt"
	"log"
	"sync"

	"sageattn"
)

const workers, tokens, heads, dim = 8, 128, 4, 64

func main() {
	log.SetFlags(0)
	context, err := sageattn.NewContext(sageattn.ContextDesc{
		Backend: sageattn.BackendCPU, NumThreads: 1, // the goroutines are threads enough
	})
	check(err)
	defer context.Close()
	desc, err := sageattn.NewAttnDesc(sageattn.PresetSage2_8B)
	check(err)
	desc.QDType = sageattn.F32
	desc.HeadDim, desc.NumQoHeads = dim, heads
	desc.MaxQoLen, desc.MaxKVLen = tokens, tokens
	plan, err := context.NewPlan(desc)
	check(err)
	defer plan.Close()

	attend := func(seed int) ([]float32, error) {
		x, out := make([]float32, tokens*heads*dim), make([]float32, tokens*heads*dim)
		for i := range x {
			x[i] = float32((i+seed)*37%101)/50 - 1
		}
		t := sageattn.Float32s(x)
		return out, plan.Execute(sageattn.Args{Batch: 1, QoLen: tokens, KVLen: tokens,
			Q: t, K: t, V: t, Out: sageattn.Float32s(out)})
	}
	var outs [workers][]float32
	var errs [workers]error
	var group sync.WaitGroup
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			outs[w], errs[w] = attend(w)
		}(w)
	}
	group.Wait()
	for w := range outs {
		check(errs[w])
		alone, err := attend(w)
		check(err)
		for i := range alone {
			if outs[w][i] != alone[i] {
				log.Fatalf("goroutine %d: element %d is %g, but alone %g", w, i, outs[w][i], alone[i])
			}
		}
	}
	fmt.Printf("%d goroutines: the same bits as one after the other\n", workers)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
