// Three sequences of different lengths, packed along the token axis. Each gives the same bits as alone.
package main

import (
	"fmt"
	"log"

	"sageattn"
)

const heads, dim, row = 4, 64, 4 * 64

func main() {
	log.SetFlags(0)
	cu := []int32{0, 100, 101, 300} // sequence b has tokens cu[b] .. cu[b + 1] - 1
	total := int(cu[3])
	q, k, v := make([]float32, total*row), make([]float32, total*row), make([]float32, total*row)
	for i := range q {
		q[i], k[i], v[i] = float32(i%7)-3, float32(i%11)/5-1, float32(i%13)/6-1
	}

	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU})
	check(err)
	defer context.Close()
	desc, err := sageattn.NewAttnDesc(sageattn.PresetSage2_8B)
	check(err)
	desc.QDType = sageattn.F32
	desc.BatchMode = sageattn.BatchVarlen
	desc.Mask = sageattn.MaskCausalBottomRight
	desc.HeadDim, desc.NumQoHeads = dim, heads
	desc.MaxBatch, desc.MaxQoLen, desc.MaxKVLen = 8, 256, 256
	plan, err := context.NewPlan(desc)
	check(err)
	defer plan.Close()

	attend := func(q, k, v []float32, cu []int32) []float32 {
		out, batch := make([]float32, len(q)), len(cu)-1
		tokens, status := int64(cu[batch]), make([]int32, batch)
		check(plan.Execute(sageattn.Args{
			Batch: batch, TotalQo: tokens, TotalKV: tokens, CuSeqlensQ: cu, CuSeqlensKV: cu,
			Q: sageattn.Float32s(q), K: sageattn.Float32s(k), V: sageattn.Float32s(v),
			Out: sageattn.Float32s(out), Status: status,
		}))
		for b, s := range status { // lengths that are nonsense are no error of the call
			if s != sageattn.SequenceOK {
				log.Fatalf("sequence %d has bad lengths", b)
			}
		}
		return out
	}
	packed := attend(q, k, v, cu)
	for b := 0; b < 3; b++ {
		first, last := cu[b]*row, cu[b+1]*row
		alone := attend(q[first:last], k[first:last], v[first:last], []int32{0, cu[b+1] - cu[b]})
		for i, x := range alone {
			if x != packed[int(first)+i] {
				log.Fatalf("sequence %d differs from itself alone at element %d", b, i)
			}
		}
		fmt.Printf("sequence %d: %d tokens, the same bits as alone\n", b, cu[b+1]-cu[b])
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
