// The parameter block of every backward kernel, passed by value. backward_launch.py packs it in this order. What has the name of a field
// of params.cuh means the same, so that mask.cuh and scores.cuh serve both.
#pragma once

struct Params {
  const Element* q;
  const Element* k;
  const Element* v;
  const Element* out;
  const Element* dout;
  const Lse* lse;
  const Lse* dlse;  // null where the log-sum-exp has no gradient
  const u8* mask;
  const BiasElement* bias;
  const void* q_lengths;
  const void* kv_lengths;
  Element* dq;
  Element* dk;
  Element* dv;
  BiasElement* dbias;  // null where it is not wanted
  Lse* row_lse;        // what backward_statistics.cuh makes of lse and dlse, (batch, head, row)
  Real* row_delta;
  // strides in elements; the innermost one of q, k, v, out, dout and of their gradients is 1
  i64 q_batch, q_head, q_row;
  i64 k_batch, k_head, k_row;
  i64 v_batch, v_head, v_row;
  i64 out_batch, out_head, out_row;
  i64 dout_batch, dout_head, dout_row;
  i64 lse_batch, lse_head, lse_row;
  i64 dlse_batch, dlse_head, dlse_row;
  i64 mask_batch, mask_head, mask_row, mask_column;
  i64 bias_batch, bias_head, bias_row, bias_column;
  i64 q_lengths_batch, kv_lengths_batch;
  i64 dq_batch, dq_head, dq_row;
  i64 dk_batch, dk_head, dk_row;
  i64 dv_batch, dv_head, dv_row;
  i64 dbias_batch, dbias_head, dbias_row, dbias_column;  // 0 along an axis over which the gradient is summed
  double scale;           // with a softcap: scale / softcap
  double scale_log2;      // scale * log2(e)
  double softcap;
  double gradient_scale;  // scale itself: dQ = gradient_scale dS K
  i32 batch;              // entries of one launch
  i32 heads;              // H_q
  i32 group;              // query heads that share a head of k and v
  i32 n_q, n_k, d, d_v;
  i32 left, right;   // the window around the diagonal
  i32 bottom_right;  // whether the diagonal ends in the last key; otherwise it starts in the first
  i32 row_tiles;     // ceil(n_q / kBr)
  i32 key_tiles;     // ceil(n_k / kBc)
  i32 statistics_rows;  // of row_lse and row_delta, from head to head: n_q rounded up to a multiple of 128
  i32 long_q_lengths, long_kv_lengths;  // whether they are 64-bit integers
  i32 add_to_dbias;     // whether an earlier launch has written it
  const i32* only_if;   // null, or where a 0 says that there is nothing to do
};
