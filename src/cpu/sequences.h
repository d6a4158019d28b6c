// The lengths of a launch, one entry a sequence.
#pragma once

#include "src/core/config.h"
#include "src/cpu/layout.h"

namespace sageattn::cpu {

// Resolves every sequence, sets the status words, and returns the number of query tiles of all
// sequences together. Nonsense lengths are what the header says at cu_seqlens_q.
int64_t resolve_sequences(const PlanConfig& plan, const Launch& launch, Sequence* sequences);

// The sequence that owns a query tile, counted over all sequences.
int sequence_of_q_tile(const Sequence* sequences, int32_t batch, int64_t tile);

}  // namespace sageattn::cpu
