// The parameter block of every forward kernel, passed by value. launch.py packs it in this order.
#pragma once

struct Params {
  const Element* q;
  const Element* k;
  const Element* v;
  Element* out;
  Lse* lse;  // null where it is not wanted
  const u8* mask;
  const BiasElement* bias;
  const void* q_lengths;
  const void* kv_lengths;
  // strides in elements; the innermost one of q, k, v, out and lse is 1
  i64 q_batch, q_head, q_row;
  i64 k_batch, k_head, k_row;
  i64 v_batch, v_head, v_row;
  i64 out_batch, out_head, out_row;
  i64 lse_batch, lse_head;
  i64 mask_batch, mask_head, mask_row, mask_column;
  i64 bias_batch, bias_head, bias_row, bias_column;
  i64 q_lengths_batch, kv_lengths_batch;
  double scale;       // with a softcap: scale / softcap
  double scale_log2;  // scale * log2(e)
  double softcap;
  i32 heads;            // H_q
  i32 group;            // query heads that share a head of k and v
  i32 n_q, n_k, d, d_v;
  i32 left, right;   // the window around the diagonal
  i32 bottom_right;  // whether the diagonal ends in the last key; otherwise it starts in the first
  i32 row_tiles;     // ceil(n_q / kBr)
  i32 long_q_lengths, long_kv_lengths;  // whether they are 64-bit integers
};
