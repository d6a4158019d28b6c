#include "src/cpu/sequences.h"

#include <algorithm>

#include "include/sageattn.h"

namespace sageattn::cpu {

namespace {

// Entries b and b + 1 of a cu_seqlens array, judged against everything before them.
struct Cut {
  int64_t start, end;
  bool good;
};

Cut cut_at(const int32_t* cu, int32_t b, int64_t total, int64_t max_len, int64_t& highest) {
  Cut cut{cu[b], cu[b + 1], true};
  // highest: the largest entry before this one (0 at first), so that no two sequences share a row.
  cut.good = cut.start >= highest && cut.end >= cut.start && cut.end <= total &&
             cut.end - cut.start <= max_len;
  // What a bad sequence may call its own.
  cut.start = std::clamp(cut.start, std::min(highest, total), total);
  cut.end = std::clamp<int64_t>(cut.end, cut.start, std::min(total, cut.start + max_len));
  highest = std::max<int64_t>(highest, cu[b]);
  return cut;
}

}  // namespace

int64_t resolve_sequences(const PlanConfig& plan, const Launch& launch, Sequence* sequences) {
  const bool varlen = plan.batch_mode == SAGEATTN_BATCH_VARLEN;
  int64_t highest_q = 0, highest_kv = 0;
  int64_t q_tiles = 0, k_tiles = 0, v_groups = 0;
  const int64_t group = plan.promotion_interval;
  for (int32_t b = 0; b < launch.batch; ++b) {
    Cut q{0, launch.qo_len, true}, kv{0, launch.kv_len, true};
    if (varlen) {
      q = cut_at(launch.cu_seqlens_q, b, launch.total_qo, plan.max_qo_len, highest_q);
      kv = cut_at(launch.cu_seqlens_kv, b, launch.total_kv, plan.max_kv_len, highest_kv);
    }
    Sequence& s = sequences[b];
    s.bad = !q.good || !kv.good;
    s.q_start = q.start;
    s.kv_start = kv.start;
    s.qo_len = static_cast<int32_t>(q.end - q.start);
    s.kv_len = static_cast<int32_t>(kv.end - kv.start);
    if (launch.seqused_kv != nullptr) {
      if (launch.seqused_kv[b] < 0 || launch.seqused_kv[b] > s.kv_len) s.bad = true;
      if (!s.bad) s.kv_len = launch.seqused_kv[b];
    }
    if (s.bad) s.kv_len = 0;
    s.first_q_tile = q_tiles;
    s.first_k_tile = k_tiles;
    s.first_v_group = v_groups;
    q_tiles += ceil_div(s.qo_len, plan.tile.b_q);
    k_tiles += ceil_div(s.kv_len, plan.tile.b_k);
    if (group > 0) v_groups += ceil_div(s.kv_len, group);
    if (launch.status != nullptr) {
      launch.status[b] = s.bad ? SAGEATTN_SEQUENCE_BAD_LENGTHS : SAGEATTN_SEQUENCE_OK;
    }
  }
  return q_tiles;
}

int sequence_of_q_tile(const Sequence* sequences, int32_t batch, int64_t tile) {
  const Sequence* after =
      std::upper_bound(sequences, sequences + batch, tile,
                       [](int64_t t, const Sequence& s) { return t < s.first_q_tile; });
  return static_cast<int>(after - sequences) - 1;
}

}  // namespace sageattn::cpu
