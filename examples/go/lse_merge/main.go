// Attention over keys in two shards, merged by their log-sum-exp, against attention over all of them.
package main

import (
	"fmt"
	"log"
	"math"
	"math/rand"

	"sageattn"
)

const queries, keys, heads, dim = 32, 512, 4, 64

func main() {
	log.SetFlags(0)
	context, err := sageattn.NewContext(sageattn.ContextDesc{Backend: sageattn.BackendCPU})
	check(err)
	defer context.Close()
	newPlan := func(preset sageattn.Preset) *sageattn.Plan {
		desc, err := sageattn.NewAttnDesc(preset)
		check(err)
		desc.QDType = sageattn.F32
		desc.HeadDim, desc.NumQoHeads = dim, heads
		desc.MaxQoLen, desc.MaxKVLen = queries, keys
		plan, err := context.NewPlan(desc)
		check(err)
		return plan
	}
	exact, plan := newPlan(sageattn.PresetExact), newPlan(sageattn.PresetSage2_8B)
	defer exact.Close()
	defer plan.Close()

	q, k, v := normal(queries), normal(keys), normal(keys)
	attend := func(plan *sageattn.Plan, first, last int) (out, lse []float32) { // over keys first .. last - 1
		out, lse = make([]float32, len(q)), make([]float32, heads*queries)
		check(plan.Execute(sageattn.Args{
			Batch: 1, QoLen: queries, KVLen: last - first,
			Q: sageattn.Float32s(q), Out: sageattn.Float32s(out), LSE: lse,
			K: sageattn.Float32s(k[first*heads*dim : last*heads*dim]),
			V: sageattn.Float32s(v[first*heads*dim : last*heads*dim]),
		}))
		return out, lse
	}
	whole, _ := attend(plan, 0, keys)
	a, lseA := attend(plan, 0, keys/2)
	b, lseB := attend(plan, keys/2, keys)

	merged := make([]float32, len(q))
	for i := range merged { // out is [token, head, channel], lse [head, token]
		row := i/dim%heads*queries + i/dim/heads
		m := math.Max(float64(lseA[row]), float64(lseB[row]))
		wA, wB := 0.0, 0.0
		if !math.IsInf(m, -1) { // else no key was visible in either
			wA, wB = math.Exp(float64(lseA[row])-m), math.Exp(float64(lseB[row])-m)
			merged[i] = float32((wA*float64(a[i]) + wB*float64(b[i])) / (wA + wB))
		}
	}

	truth, _ := attend(exact, 0, keys)
	relError := func(out []float32) float64 {
		result, err := sageattn.Compare(sageattn.CompareArgs{
			Batch: 1, Len: queries, NumHeads: heads, HeadDim: dim,
			Out: sageattn.Float32s(out), Ref: sageattn.Float32s(truth),
		})
		check(err)
		return result.RelError
	}
	fmt.Printf("error of the whole %.4f, of the merged pieces %.4f\n", relError(whole), relError(merged))
	if relError(merged) > 1.2*relError(whole) {
		log.Fatal("the pieces do not merge")
	}
}

var source = rand.New(rand.NewSource(1))

func normal(tokens int) []float32 {
	x := make([]float32, tokens*heads*dim)
	for i := range x {
		x[i] = float32(source.NormFloat64())
	}
	return x
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
