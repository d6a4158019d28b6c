// What happens to Q, K and V before their products: means, smoothing, rotation, quantization
// (docs/numerics.md, sections 2 to 4).
#pragma once

#include <cstdint>

#include "src/core/config.h"
#include "src/cpu/layout.h"

namespace sageattn::cpu {

// Everything that the steps of one launch share.
struct Task {
  const PlanConfig& plan;
  const Launch& launch;
  Shape shape;
  Areas areas;
  int64_t q_tiles;  // of all sequences, for one query head
};

// What turns a dot product into a score in base 2: sm_scale log2(e).
float score_scale(const PlanConfig& plan);

int64_t k_tile_index(const Task& task, const Sequence& sequence, int kv_head, int64_t tile);
// Row of areas.v_scale or v_mean; group 0 where there is one for the sequence.
int64_t v_group_index(const Task& task, int batch, int kv_head, int64_t group);

// Fill the areas of one kv head of one sequence.
void quantize_k(const Task& task, int batch, int kv_head, Scratch& scratch);
void quantize_v(const Task& task, int batch, int kv_head, Scratch& scratch);

// PER_TENSOR only: the scale of all queries of a head. After quantize_k.
void scale_q(const Task& task, int batch, int qo_head, Scratch& scratch);

// Fills the scratch's Q codes, scales (without sm_scale) and q_mean for one tile of queries.
void quantize_q_tile(const Task& task, int batch, int qo_head, int64_t tile, Scratch& scratch);

// Fills scratch.ds: the products of q_mean with the keys of one tile.
void score_correction(const Task& task, int batch, int kv_head, int64_t tile, Scratch& scratch);

// Natural-log share of the LSE that smoothing K took away: sm_scale q . kbar, in fp64.
double k_mean_score(const Task& task, int batch, int qo_head, int64_t query);

}  // namespace sageattn::cpu
