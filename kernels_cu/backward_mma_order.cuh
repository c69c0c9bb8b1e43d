// The order in which blocks take tiles of keys and add to dQ. A block takes its tile when it starts, the next one of the order, and adds to
// the sums of a row tile when all tiles of its head with lower numbers that see these rows have; so it waits only for blocks that have
// started before it, which wait only for such themselves.
#pragma once

template <class T> constexpr bool is_half = false;
template <> constexpr bool is_half<half_t> = true;
constexpr bool kHalf = is_half<Element>;

struct MmaParams {
  Params p;
  float* sums;       // of dQ, before it is scaled: by row tile of every head, in fragments
  i32* turns;        // by row tile of every head, and warp: how many key tiles are in its sums
  u32* next_tile;    // that a block may take
  float* row_sizes;  // |dO| of every row, (batch, head, row), where kHalf
  i32* special;      // where Element is float: whether there are numbers that TF32 does not serve
  i32 section;       // heads of K and V that are worked on together, key tile by key tile
};

// The block's place in the problem.
struct Place {
  i32 batch, kv_head, key_tile;
};

// Tiles are taken section by section, in a section by key tile, so that blocks which add to the same sums start some time apart.
__device__ __forceinline__ Place take_tile(const MmaParams& own, u32* shared) {
  const Params& p = own.p;
  if (threadIdx.x == 0) *shared = atomicInc(own.next_tile, 0xffffffff);
  __syncthreads();
  const i32 number = static_cast<i32>(*shared), heads = p.batch * (p.heads / p.group);
  const i32 last = heads / own.section - 1, section = min(number / (own.section * p.key_tiles), last);
  const i32 first = section * own.section, width = section == last ? heads - first : own.section;
  const i32 within = number - first * p.key_tiles, head = first + within % width;
  return {head / (p.heads / p.group), head % (p.heads / p.group), within / width};
}

// One step of a block's walk: a row tile of one of the `group` heads that share its keys; each tile of all heads, then the tile before it
struct Visit {
  i32 head, tile;

  __device__ __forceinline__ Visit after(i32 group) const { return head + 1 < group ? Visit{head + 1, tile} : Visit{0, tile - 1}; }
  __device__ __forceinline__ Visit before(i32 group) const { return head > 0 ? Visit{head - 1, tile} : Visit{group - 1, tile + 1}; }
};

// red takes a subnormal number for 0, be it the sum or what is added. Beside numbers of this size, that is less than their rounding. Where
// all are smaller, they are added by load and store: it is the warp's turn, and so nobody else adds. float16 ends long before.
constexpr float kLeastForRed = 0x1p-100f;

// The sums of dQ that blocks add to in turn: warp by warp, as a warp has the same part of every tile in all blocks. Lane 0 sees to the order.
struct Sums {
  const MmaParams& own;
  const Visibility& see;
  const Place& at;
  const Warp& warp;
  Lane lane;
  i32* added = nullptr;  // the count of what the warp has added last, which it has yet to raise

  static constexpr i32 kOfFragment = 4 * 32;
  static constexpr i32 kOfWarp = kDqRowBlocks * DqColumns::kBlocks * kOfFragment;

  __device__ __forceinline__ i64 index(Visit visit) const {
    const i64 head = at.batch * own.p.heads + at.kv_head * own.p.group + visit.head;
    return (head * own.p.row_tiles + visit.tile) * kWarps + warp.index;
  }
  __device__ __forceinline__ i32 turn(Visit visit) const { return at.key_tile - (kLeft ? see.first_key(visit.tile * kBr) / kBc : 0); }

  // Looks some time before the turn is needed, so as not to wait for the answer.
  __device__ __forceinline__ bool look(Visit visit) const { return lane.index == 0 && ld_relaxed(own.turns + index(visit)) == turn(visit); }

  // Waits for the turn, unless it `is_seen`, and ends the one before.
  __device__ __forceinline__ void take_turn(Visit visit, bool is_seen) {
    if (lane.index == 0) {
      i32* const count = own.turns + index(visit);
      if (is_seen) {
        fence_acq_rel();  // between what was added before, or seen, and what follows
        if (added != nullptr) red_relaxed_add(added, 1);
      } else {
        end_turn();
        ld_acquire_until(count, turn(visit));
      }
      added = count;
    }
    __syncwarp();
  }
  __device__ __forceinline__ void end_turn() const {
    if (lane.index == 0 && added != nullptr) red_release_add(added, 1);
  }

  __device__ __forceinline__ void add(Visit visit, const DqFragments& dq, float unit) const {
    float* const to = own.sums + index(visit) * kOfWarp;
    if (turn(visit) == 0)
      add_fragments<kAsFirst>(to, dq, unit);
    else if (kHalf || least_addend(dq, unit) >= kLeastForRed)  // nearly always: one test for all
      add_fragments<kByRed>(to, dq, unit);
    else
      add_fragments<kOneByOne>(to, dq, unit);
  }
  enum How { kAsFirst, kByRed, kOneByOne };
  template <How kHow> __device__ __forceinline__ void add_fragments(float* to, const DqFragments& dq, float unit) const {
#pragma unroll
    for (i32 i = 0; i < kDqRowBlocks; ++i)
#pragma unroll
      for (i32 j = 0; j < DqColumns::kBlocks; ++j)
        if (warp.dq_columns.has(j)) add_fragment<kHow>(to + (i * DqColumns::kBlocks + j) * kOfFragment, dq[i][j], unit, lane);
  }
  template <How kHow> static __device__ __forceinline__ void add_fragment(float* to, const float (&dq)[4], float unit, Lane lane) {
    const float x[4] = {dq[0] * unit, dq[1] * unit, dq[2] * unit, dq[3] * unit};
    if constexpr (kVectorAdds) {
      to += 4 * lane.index;
      auto& sum = *reinterpret_cast<Vector<float, 4>*>(to);
      if (kHow == kAsFirst)
        sum = {x[0], x[1], x[2], x[3]};
      else if (kHow == kByRed || largest_of(x) >= kLeastForRed)
        red_add_f32x4(to, x);
      else if (x[0] != 0 || x[1] != 0 || x[2] != 0 || x[3] != 0)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) sum.x[e] += x[e];
    } else {
#pragma unroll
      for (i32 e = 0; e < 4; ++e) {
        float& sum = to[32 * e + lane.index];
        if (kHow == kAsFirst)
          sum = x[e];
        else if (kHow == kByRed || fabsf(x[e]) >= kLeastForRed)
          red_add_f32(&sum, x[e]);
        else if (x[e] != 0)
          sum += x[e];
      }
    }
  }
  // The least of what one instruction adds, by its largest number
  __device__ __forceinline__ float least_addend(const DqFragments& dq, float unit) const {
    float least = kInfinity;
#pragma unroll
    for (i32 i = 0; i < kDqRowBlocks; ++i)
#pragma unroll
      for (i32 j = 0; j < DqColumns::kBlocks; ++j) {
        if (!warp.dq_columns.has(j)) continue;
        const float x[4] = {dq[i][j][0] * unit, dq[i][j][1] * unit, dq[i][j][2] * unit, dq[i][j][3] * unit};
        least = fminf(least, kVectorAdds ? largest_of(x) : fminf(fminf(fabsf(x[0]), fabsf(x[1])), fminf(fabsf(x[2]), fabsf(x[3]))));
      }
    return least;
  }
  static __device__ __forceinline__ float largest_of(const float (&x)[4]) {
    return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
  }
  static __device__ __forceinline__ float sum_of(const float* fragment, i32 e, Lane lane) {
    return fragment[kVectorAdds ? 4 * lane.index + e : 32 * e + lane.index];
  }
};

