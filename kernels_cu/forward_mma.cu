// Attention forward on tensor cores with mma.sync: float16 and bfloat16, float32 as 3xTF32; sm_75 and up.
//
//   S = scale Q K^T,  P = softmax(S),  O = P V,  LSE = m + log l
//
// FlashAttention-2, Algorithm 1 (Dao 2023). A block owns B_r query rows of one head, or, where kPackGqa, B_r pairs (row, head) of the
// heads that share K and V, and walks over the K and V tiles of B_c keys, kStages of which are on their way or in use in shared memory.
// A warp owns 16 or more rows whole: S, P, O, m and l stay in its registers, and warps meet only where a tile has arrived.
#include "ptx.cuh"
#include "variant.cuh"
#include "arithmetic.cuh"
#include "params.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "mma_tile.cuh"
#include "mma_fragments.cuh"
#include "mma_tf32.cuh"
#include "mma_products.cuh"
#include "mma_softmax.cuh"

// ---- constants ----
constexpr i32 kAhead = kStages == 1 ? 1 : kStages - 1;  // groups of copies under way when the walk starts

static_assert(kThreads == 32 * kWarps, "a warp has 32 threads");
static_assert(kStages >= 1, "a tile needs room");
static_assert(2 * kKeyBlocks <= 32, "what a lane sees of a row fits 32 bits");

// ---- shared memory: Q, then kStages pairs of K and V, then the bias of two tiles; O takes their place in the end ----
constexpr i32 kQBytes = kBr * TileLayout<kD>::kPitch;
constexpr i32 kKBytes = kBc * TileLayout<kD>::kPitch;
constexpr i32 kVBytes = kBc * TileLayout<kDv>::kPitch;

// ---- pieces ----
// The block's place in the problem. Its rows are numbered from 0; each is a query row of a head.
struct Place {
  i32 batch, head, kv_head;  // head: the first one
  i32 first;                 // number, within the head or group, of the block's row 0
  i32 group;                 // heads whose rows are packed together

  __device__ __forceinline__ i32 query_row(i32 row) const { return kPackGqa ? (first + row) / group : first + row; }
  __device__ __forceinline__ i32 head_offset(i32 row) const { return kPackGqa ? (first + row) % group : 0; }
};

__device__ __forceinline__ Place place(const Params& p) {
  Place at;
  at.group = kPackGqa ? p.group : 1;
  const i32 heads = p.heads / at.group;
  const u32 block = block_index();
  const i32 row_tile = p.row_tiles - 1 - static_cast<i32>(block % p.row_tiles);  // the longest rows of a causal mask first
  const i32 slot = static_cast<i32>(block / p.row_tiles);
  at.batch = slot / heads;
  at.head = slot % heads * at.group;
  at.kv_head = at.head / p.group;
  at.first = row_tile * kBr;
  return at;
}

// The number of the row in slot r
__device__ __forceinline__ i32 number_of_row(i32 r, Lane lane) {
  return kRowBlock * (kRowBlocks * static_cast<i32>(threadIdx.x / 32) + r / 2) + 8 * (r % 2) + lane.g;
}

// Softcap, where a bias follows. As long as all scores are small, it is a short series in q . k, its factors taken together.
__device__ __forceinline__ void cap_scores(SAccumulators& s, const Scores& score) {
  const SoftcapSeries series = score.softcap_series(1);
  bool small = true;
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) small &= largest_in_slot<true>(s, r) < series.limit;
  if (__all_sync(0xffffffff, small)) {
#pragma unroll
    for (i32 i = 0; i < kSValues; ++i) value_of(s, i) = series(value_of(s, i));
  } else {
#pragma unroll
    for (i32 i = 0; i < kSValues; ++i) {
      float& x = value_of(s, i);
      x = fabsf(x) < series.limit ? series(x) : score.softcap * tanh_of(x * score.scale);
    }
  }
}

// Bias, of a tile that starts at key `key0`; `bias_smem`, where it is the same for all rows, holds that of the tile's keys.
template <bool kMasked>
__device__ __forceinline__ void add_bias(SAccumulators& s, const Scores& score, const Visibility& see, const Place& at,
                                         const float* bias_smem, i32 key0, Lane lane) {
  const auto add = [&](float& x, float bias) { x = kSoftcap ? x + bias : fmaf(x, score.scale, bias); };
  if (bias_smem != nullptr) {
#pragma unroll
    for (i32 j = 0; j < kKeyBlocks; ++j) {
      const auto bias = *reinterpret_cast<const Vector<float, 2>*>(bias_smem + j * kColumnBlock + 2 * lane.t);
#pragma unroll
      for (i32 r = 0; r < kRows; ++r)
#pragma unroll
        for (i32 e = 0; e < 2; ++e) add(s[r / 2][j][2 * (r % 2) + e], bias.x[e]);
    }
  } else {
    constexpr i32 kTogether = 2;  // key blocks; more loads under way would leave no registers
#pragma unroll
    for (i32 first = 0; first < kKeyBlocks; first += kTogether) {
      if (key0 + first * kColumnBlock >= see.key_length) break;
#pragma unroll
      for (i32 r = 0; r < kRows; ++r) {
        const i32 number = number_of_row(r, lane), row = min(at.query_row(number), see.query_length - 1);
        const Scores of_head = score.of_head(at.head_offset(number));
#pragma unroll
        for (i32 j = first; j < first + kTogether; ++j)
#pragma unroll
          for (i32 e = 0; e < 2; ++e) {
            const i32 key = key0 + j * kColumnBlock + 2 * lane.t + e;
            add(s[r / 2][j][2 * (r % 2) + e], kMasked && key >= see.key_length ? 0 : of_head.bias_at(row, key));
          }
      }
    }
  }
}

// A bias that is the same for all rows, of two tiles in shared memory: on its way, it is a register of a few threads.
struct SharedBias {
  static constexpr i32 kPerThread = (kBc + kThreads - 1) / kThreads;
  const Scores& score;
  float* smem;
  float on_its_way[kPerThread];

  __device__ __forceinline__ bool is_used() const { return score.bias_row == 0 && (!kPackGqa || score.bias_head == 0); }
  __device__ __forceinline__ float* place(i32 tile) const { return smem + tile % 2 * kBc; }
  __device__ __forceinline__ const float* of_tile(i32 tile) const { return is_used() ? place(tile) : nullptr; }

  __device__ __forceinline__ void load(i32 tile, const Visibility& see) {
#pragma unroll
    for (i32 n = 0; n < kPerThread; ++n) {
      const i32 column = n * kThreads + static_cast<i32>(threadIdx.x), key = tile * kBc + column;
      on_its_way[n] = is_used() && column < kBc && key < see.key_length ? score.bias_at(0, key) : 0;
    }
  }
  __device__ __forceinline__ void store(i32 tile) const {
#pragma unroll
    for (i32 n = 0; n < kPerThread; ++n) {
      const i32 column = n * kThreads + static_cast<i32>(threadIdx.x);
      if (column < kBc) place(tile)[column] = on_its_way[n];
    }
  }
};

// Masks, of a tile that starts at key `key0`
__device__ __forceinline__ void mask_scores(SAccumulators& s, const Visibility& see, const Place& at, i32 key0, Lane lane) {
  const auto sees = [&](i32 r, i32 j, i32 e) {
    const i32 number = number_of_row(r, lane);
    return see.of_head(at.head_offset(number)).sees(at.query_row(number), key0 + j * kColumnBlock + 2 * lane.t + e);
  };
  u32 seen[kRows] = {};  // with a mask in memory: bit 2 j + e for column e of key block j
  if constexpr (kMask) {
#pragma unroll 1  // few loads at a time: S and O leave no room for more
    for (i32 j = 0; j < kKeyBlocks; ++j)
#pragma unroll
      for (i32 e = 0; e < 2; ++e)
#pragma unroll
        for (i32 r = 0; r < kRows; ++r) seen[r] |= static_cast<u32>(sees(r, j, e)) << (2 * j + e);
  }
#pragma unroll
  for (i32 j = 0; j < kKeyBlocks; ++j)
#pragma unroll
    for (i32 r = 0; r < kRows; ++r)
#pragma unroll
      for (i32 e = 0; e < 2; ++e)
        if (!(kMask ? seen[r] >> (2 * j + e) & 1 : sees(r, j, e))) s[r / 2][j][2 * (r % 2) + e] = -kInfinity;
}

// A negative scale moves into Q, and so does 0, which would turn masked scores into NaN.
__device__ __forceinline__ void scale_q_by_sign(u8* q_tile, float scale) {
  for (i32 i = threadIdx.x; i < kBr * TileLayout<kD>::kChunks; i += kThreads) {
    u8* const chunk = q_tile + TileLayout<kD>::offset(i / TileLayout<kD>::kChunks, i % TileLayout<kD>::kChunks);
    for (Element& q : *reinterpret_cast<Element(*)[kChunkElements]>(chunk)) from_real(q, to_real(q) * (scale < 0 ? -1.0f : 0.0f));
  }
}

// Two neighbours of O to shared memory
template <class T> __device__ __forceinline__ void store_pair(u8* to, float x0, float x1, T) {
  *reinterpret_cast<u32*>(to) = packed(x0, x1, T{});
}
__device__ __forceinline__ void store_pair(u8* to, float x0, float x1, float) { *reinterpret_cast<Vector<float, 2>*>(to) = {x0, x1}; }

// O / l, through shared memory, and LSE, of the rows for which `is_due`. Rows beyond the live ones, and rows that saw no key, are 0 and
// -inf. Q and the tiles are no longer needed; a warp stores the rows that it owns.
template <class IsDue>
__device__ __forceinline__ void store_rows(const Params& p, u8* smem, const OAccumulators& o, const RowsState& rows, Real c,
                                           Real unit_of_o, IsDue is_due) {
  using Out = TileLayout<kDv>;
  const Place at = place(p);
  const Visibility see = visibility(p, at.batch, at.head);
  const Lane lane = {};
  Element* const out = p.out + at.batch * p.out_batch + at.head * p.out_head;
  Lse* const lse = p.lse + at.batch * p.lse_batch + at.head * p.lse_head;
  const LogUnits units = log_units(p, c);
#pragma unroll
  for (i32 r = 0; r < kRows; ++r) {
    const i32 number = number_of_row(r, lane);
    const i32 row = at.query_row(number);
    const i64 head = at.head_offset(number);
    const Real l = rows.sum(r);
    const bool empty = row >= see.query_length || l == 0;
    const bool stores = row < p.n_q && is_due(r);
    if (p.lse != nullptr) {
      const Lse log_sum_exp = rows.log_sum_exp(r, l, units);
      if (stores && lane.t == 0) lse[head * p.lse_head + row] = empty ? -static_cast<Lse>(kInfinity) : log_sum_exp;
    }

    const Real per_l = 1 / rows.divisor(r, l);
#pragma unroll
    for (i32 b = 0; b < kOutBlocks; ++b) {
      const i32 column = b * kColumnBlock + 2 * lane.t;
      const float x0 = o[r / 2][b][2 * (r % 2)] * per_l * unit_of_o, x1 = o[r / 2][b][2 * (r % 2) + 1] * per_l * unit_of_o;
      store_pair(smem + Out::offset(number, column / kChunkElements) + column % kChunkElements * sizeof(Element), empty ? 0 : x0,
                 empty ? 0 : x1, Element{});
    }
    __syncwarp();
    if (stores)
      for (i32 column = lane.t * kElementsPerAccess; column < p.d_v; column += 4 * kElementsPerAccess)
        *reinterpret_cast<ElementVector*>(out + head * p.out_head + row * p.out_row + column) = *reinterpret_cast<const ElementVector*>(
            smem + Out::offset(number, column / kChunkElements) + column % kChunkElements * sizeof(Element));
  }
}

// Prologue and main loop: loads Q and walks over the keys that the block's rows see.
template <class Product>
__device__ __forceinline__ void attend(const Params& p, u8* smem, OAccumulators& o, RowsState& rows, Real c, const Product& product) {
  const Lane lane = {};
  const Place at = place(p);
  const Visibility see = visibility(p, at.batch, at.head);
  const KeyTiles tiles = key_tiles(see, at.query_row(0), at.query_row(kBr - 1) + 1);
  u8* const q_smem = smem;
  const auto k_smem = [&](i32 tile) { return smem + kQBytes + tile % kStages * (kKBytes + kVBytes); };
  const auto v_smem = [&](i32 tile) { return k_smem(tile) + kKBytes; };

  const Element* const q = p.q + at.batch * p.q_batch + at.head * p.q_head;
  const Element* const k = p.k + at.batch * p.k_batch + at.kv_head * p.k_head;
  const Element* const v = p.v + at.batch * p.v_batch + at.kv_head * p.v_head;
  const auto load_k = [&](i32 tile) {
    const Element* const first = k + tile * kBc * p.k_row;
    copy_tile<kBc, kD>(k_smem(tile), [&](i32 row) { return first + row * p.k_row; }, see.key_length - tile * kBc, p.d);
  };
  const auto load_v = [&](i32 tile) {
    const Element* const first = v + tile * kBc * p.v_row;
    copy_tile<kBc, kDv>(v_smem(tile), [&](i32 row) { return first + row * p.v_row; }, see.key_length - tile * kBc, p.d_v);
  };

  // Prologue: Q and the first tiles.
  copy_tile<kBr, kD>(
      q_smem, [&](i32 row) { return q + at.head_offset(row) * p.q_head + at.query_row(row) * p.q_row; },
      see.query_length * at.group - at.first, p.d);
  commit_copies();
#pragma unroll
  for (i32 ahead = 0; ahead < kAhead; ++ahead) {
    const i32 tile = tiles.first + ahead;
    if (tile < tiles.end) {
      load_k(tile);
      if (kStages > 1) load_v(tile);
    }
    commit_copies();
  }
  wait_for_copies<kAhead>();
  __syncthreads();
  Scores score = scores(p, at.batch, at.head);
  if ((kFolded && score.scale_log2 <= 0) || (kCapsLate && score.scale < 0)) {
    scale_q_by_sign(q_smem, score.scale);
    __syncthreads();
    score.scale = fabsf(score.scale);
  }
  const Capped capped = {score.softcap_series(static_cast<float>(kLog2E)), score};
  const u32 q_address = piece_by_rows<kD>(q_smem, kRowBlocks * kRowBlock * (threadIdx.x / 32), lane);
  const auto read_q = [&](u32(&to)[kRowBlocks][4], i32 step) {
#pragma unroll
    for (i32 i = 0; i < kRowBlocks; ++i) ldmatrix_x4(to[i], TileLayout<kD>::shifted(q_address, i * kRowBlock, step * kStepChunks));
  };
  QFragments q_rmem;
  if (kQInRegisters)
#pragma unroll
    for (i32 step = 0; step < kQkSteps; ++step) read_q(q_rmem[step], step);
  const auto q_step = [&](u32(&to)[kRowBlocks][4], i32 step) {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (i32 i = 0; i < kRowBlocks; ++i)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) to[i][e] = q_rmem[step][i][e];
    } else {
      read_q(to, step);
    }
  };

  SharedBias bias = {score, reinterpret_cast<float*>(smem + kQBytes + kStages * (kKBytes + kVBytes))};
  if (kBias) {
    bias.load(tiles.first, see);
    bias.store(tiles.first);
  }

  // Main loop: for each K_j, V_j.
#pragma unroll 1
  for (i32 j = tiles.first; j < tiles.end; ++j) {
    wait_for_copies<kAhead - 1>();  // K_j, and with two stages or more V_j, has arrived
    __syncthreads();                // for every thread; and every warp is done with what the next copies replace
    if (kStages == 1) {
      load_v(j);
    } else if (j + kAhead < tiles.end) {
      load_k(j + kAhead);
      load_v(j + kAhead);
    }
    commit_copies();
    if (kBias) bias.load(j + 1, see);

    SAccumulators s = {};
    product.multiply_q_k(s, q_step, k_smem(j), lane);

    if (kStages == 1) {
      wait_for_copies<0>();  // V_j has arrived
      __syncthreads();       // and every warp is done with K_j
      if (j + 1 < tiles.end) load_k(j + 1);
      commit_copies();
    }
    const bool whole = tiles.whole(j);
    if constexpr (kSoftcap && !kCapsLate) cap_scores(s, score);
    if (kBias && whole) add_bias<false>(s, score, see, at, bias.of_tile(j), j * kBc, lane);
    if (kBias && !whole) add_bias<true>(s, score, see, at, bias.of_tile(j), j * kBc, lane);
    Real largest[kRows];
    const bool small = kCapsLate && capped.are_small(s, largest);
    if (!whole) mask_scores(s, see, at, j * kBc, lane);
    if (!kCapsLate) largest_of_lane(s, largest);
    rows.take(s, o, largest, c, capped);
    if (kCapsLate) {
      capped.apply(s, rows.offset, small);
      if (!whole) mask_scores(s, see, at, j * kBc, lane);  // -inf was capped, too
    }
    rows.subtract_shifts(s);

    if (kBias) bias.store(j + 1);
    product.multiply_p_v(o, s, [&](i32 key_block) { rows.weigh(s, key_block, c); }, v_smem(j), p.d_v, lane, rows.l_of_p);
  }
  wait_for_copies<0>();
  __syncthreads();  // shared memory is free
}

// ---- what TF32 does not serve ----
// What a row still needs after 3xTF32. Parts of an infinity, or of numbers close to the least one, are NaN and 0.
enum class Service : u32 { done, infinities, small_numbers };
constexpr float kSmall = 0x1p-80f;

__device__ __forceinline__ Service service_of(const RowsState& rows, const OAccumulators& o, i32 r) {
  const Real l = rows.sum(r);
  float size = 0;
#pragma unroll
  for (i32 b = 0; b < kOutBlocks; ++b) size += fabsf(o[r / 2][b][2 * (r % 2)]) + fabsf(o[r / 2][b][2 * (r % 2) + 1]);
  size = sum_over_quad(size);
  return l != l || size != size ? Service::infinities : l > 0 && size < kSmall * l ? Service::small_numbers : Service::done;
}

// Computes the rows again that are not done; two bits of `services` for each. A function of its own, that it takes no registers from
// the kernel.
template <class T> __noinline__ __device__ void serve_again(const Params& p, u8* smem, u32 services) {
  const Real c = softmax_factor(p);
#pragma unroll 1
  for (u32 service = 1; service <= static_cast<u32>(Service::small_numbers); ++service) {
    const Tf32Products<true> product = {service == static_cast<u32>(Service::small_numbers) ? 1 / kSmall : 1};
    OAccumulators o = {};
    RowsState rows;
    attend(p, smem, o, rows, c, product);
    store_rows(p, smem, o, rows, c, 1 / product.v_unit, [&](i32 r) { return (services >> (2 * r) & 3) == service; });
    __syncthreads();
  }
}

// ---- the kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) forward_mma(const __grid_constant__ Params p) {
  DYNAMIC_SMEM(smem);
  const Real c = softmax_factor(p);
  OAccumulators o = {};
  RowsState rows;
  attend(p, smem, o, rows, c, Products<Element>{});
  if constexpr (sizeof(Element) == 2) {
    store_rows(p, smem, o, rows, c, 1, [](i32) { return true; });
  } else {
    u32 services = 0;
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) services |= static_cast<u32>(service_of(rows, o, r)) << (2 * r);
    store_rows(p, smem, o, rows, c, 1, [&](i32 r) { return (services >> (2 * r) & 3) == 0; });
    if (__syncthreads_or(services != 0)) serve_again<Element>(p, smem, services);
  }
}
