// The torch ops, on the libtorch stable ABI: one binary for every torch >= 2.10, CPU or CUDA. They mutate
// the outputs they are given and return nothing; vegas_ops/ops.py documents and allocates.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bindings/checks.h"
#include "vegas_ops/api.h"

// Exists only in CUDA builds of torch: weak, so that this file loads beside a CPU-only torch.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace vegas_ops::bindings {
namespace {

void set_workspace(void*& pointer, size_t& bytes, const OptionalTensor& workspace, const Place& place) {
  pointer = nullptr;
  bytes = 0;
  if (!workspace) return;
  place.check(*workspace, "workspace");
  check_contiguous(*workspace, "workspace");
  pointer = workspace->mutable_data_ptr();
  bytes = static_cast<size_t>(workspace->numel()) * workspace->element_size();
}

// ---------------------------------------------------------------------------------------------------------------
// Tensors to parameter structs

void set_descale(VegasCacheView& view, const OptionalTensor& descale, const char* name, int64_t batch, int64_t heads,
                 const Place& place) {
  view.descale = nullptr;
  view.descale_stride_batch = view.descale_stride_head = 0;
  if (!descale) return;
  const Tensor& t = *descale;
  check_dtype(t, name, ScalarType::Float);
  place.check(t, name);
  view.descale = static_cast<const float*>(t.const_data_ptr());
  if (t.dim() == 1 && t.size(0) == 1) return;
  if (t.dim() == 1 && t.size(0) == heads) {
    view.descale_stride_head = t.stride(0);
  } else if (t.dim() == 2 && t.size(0) == batch && t.size(1) == heads) {
    view.descale_stride_batch = t.stride(0);
    view.descale_stride_head = t.stride(1);
  } else {
    refuse("`", name, "` must have shape (1,), (", heads, ",) or (", batch, ", ", heads, "), got ", shape_of(t));
  }
}

void set_view(VegasCacheView& view, const Tensor& t, const char* name, const Place& place) {
  place.check(t, name);
  check_last_dim_contiguous(t, name);
  view.data = t.const_data_ptr();
  view.stride_page = t.stride(0);
  view.stride_token = t.stride(1);
  view.stride_head = t.stride(2);
}

// Of a cache or of a selection.
template <class Params>
void set_block_table(Params& params, const OptionalTensor& block_table, int64_t batch, const Place& place) {
  if (!block_table) return;
  check_dtype(*block_table, "block_table", ScalarType::Int);
  check_shape(*block_table, "block_table", {batch, kAny});
  place.check(*block_table, "block_table");
  check_last_dim_contiguous(*block_table, "block_table");
  params.block_table = static_cast<const int32_t*>(block_table->const_data_ptr());
  params.block_table_stride = block_table->stride(0);
  params.max_pages = narrow(block_table->size(1), "block_table");
}

VegasPagedCache paged_cache(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            const OptionalTensor& block_table, const OptionalTensor& k_descale,
                            const OptionalTensor& v_descale, int64_t batch, const Place& place) {
  VegasPagedCache c{};
  check_shape(k_cache, "k_cache", {kAny, kAny, kAny, q.size(q.dim() - 1)});
  check_shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), k_cache.size(2), k_cache.size(3)});
  c.dtype = to_vegas(k_cache, "k_cache");
  if (c.dtype != VEGAS_FP8_E4M3 && k_cache.scalar_type() != q.scalar_type()) {
    refuse("`k_cache` must be ", dtype_name(q.scalar_type()), " like `q`, or float8_e4m3fn, got ",
           dtype_name(k_cache.scalar_type()));
  }
  check_dtype(v_cache, "v_cache", k_cache.scalar_type());
  set_view(c.k, k_cache, "k_cache", place);
  set_view(c.v, v_cache, "v_cache", place);
  c.num_pages = k_cache.size(0);
  c.page_size = narrow(k_cache.size(1), "page_size");
  c.num_heads_kv = narrow(k_cache.size(2), "num_heads_kv");
  c.head_dim = narrow(k_cache.size(3), "head_dim");
  set_descale(c.k, k_descale, "k_descale", batch, c.num_heads_kv, place);
  set_descale(c.v, v_descale, "v_descale", batch, c.num_heads_kv, place);
  set_block_table(c, block_table, batch, place);
  return c;
}

VegasDtype query_dtype(const Tensor& q) {
  if (q.dim() != 3) refuse("`q` must have shape (rows, num_heads_q, head_dim), got ", shape_of(q));
  VegasDtype dtype = to_vegas(q, "q");
  if (dtype == VEGAS_FP8_E4M3) refuse("`q` must be float32, bfloat16 or float16, got float8_e4m3fn");
  check_last_dim_contiguous(q, "q");
  return dtype;
}

template <class Params>
void set_out(Params& p, const Tensor& out, const Tensor& q, const Place& place) {
  check_dtype(out, "out", q.scalar_type());
  check_shape(out, "out", {q.size(0), q.size(1), q.size(2)});
  place.check(out, "out");
  check_last_dim_contiguous(out, "out");
  p.out = out.mutable_data_ptr();
  p.out_stride_row = out.stride(0);
  p.out_stride_head = out.stride(1);
}

float* mutable_floats(const Tensor& t, const char* name, std::initializer_list<int64_t> shape, const Place& place) {
  return const_cast<float*>(data<float>(t, name, shape, place));
}

VegasDtype logits_dtype(const Tensor& logits, VegasDump dump) {
  ScalarType type = logits.scalar_type();
  bool summed = dump == VEGAS_DUMP_TOKEN || dump == VEGAS_DUMP_TOKEN_WEIGHT;
  if (type == ScalarType::Float) return VEGAS_FLOAT32;
  if (type == ScalarType::BFloat16 && !summed) return VEGAS_BFLOAT16;
  refuse("`logits` must be float32", summed ? "" : " or bfloat16", " for this dump, got ", dtype_name(type));
}

VegasDump to_dump(int64_t dump) {
  if (dump < VEGAS_DUMP_NONE || dump > VEGAS_DUMP_ALL) refuse("`dump` must be 0 to 5, got ", dump);
  return static_cast<VegasDump>(dump);
}

// Runs a C function on the tensors' device and current stream, and turns its status into an exception.
template <class Params>
void call(int (*function)(const Params*, VegasDevice, void*), const Params& params, const Place& place) {
  int status;
  if (place.cuda) {
    if (!aoti_torch_get_current_cuda_stream) throw std::runtime_error("vegas_ops: this torch was built without CUDA");
    torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(place.index));
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(static_cast<int32_t>(place.index), &stream));
    status = function(&params, VEGAS_CUDA, stream);
  } else {
    status = function(&params, VEGAS_CPU, nullptr);
  }
  if (status == VEGAS_INVALID_ARGUMENT) throw std::invalid_argument(vegas_last_error());
  if (status != VEGAS_OK) throw std::runtime_error(vegas_last_error());
}

// ---------------------------------------------------------------------------------------------------------------
// The ops

void flash_attn_with_logit_dump(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& block_table, const Tensor& seqused_k, const Tensor& cu_seqlens_q,
                                int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale, bool causal,
                                int64_t window_left, int64_t window_right, double softcap, OptionalTensor sinks,
                                OptionalTensor k_descale, OptionalTensor v_descale, int64_t dump,
                                OptionalTensor guide_lse_hint, OptionalTensor dump_rows, OptionalTensor dump_len,
                                bool batch_invariant, int64_t num_splits, Tensor out, Tensor lse, OptionalTensor logits,
                                OptionalTensor guide_lse, OptionalTensor workspace) {
  Place place(q);
  VegasVerifyParams p{};
  p.q_dtype = query_dtype(q);
  if (seqused_k.dim() != 1) refuse("`seqused_k` must have shape (batch,), got ", shape_of(seqused_k));
  int64_t batch = seqused_k.size(0), heads_q = q.size(1), total_q = q.size(0);
  p.cache = paged_cache(q, k_cache, v_cache, block_table, k_descale, v_descale, batch, place);
  int64_t heads_kv = p.cache.num_heads_kv;
  p.q = q.const_data_ptr();
  p.q_stride_row = q.stride(0);
  p.q_stride_head = q.stride(1);
  p.seqused_k = data<int32_t>(seqused_k, "seqused_k", {batch}, place);
  p.cu_seqlens_q = data<int32_t>(cu_seqlens_q, "cu_seqlens_q", {batch + 1}, place);
  p.batch = narrow(batch, "batch");
  p.total_q = narrow(total_q, "total_q");
  p.num_heads_q = narrow(heads_q, "num_heads_q");
  p.max_seqlen_q = narrow(max_seqlen_q, "max_seqlen_q");
  p.max_seqlen_k = narrow(max_seqlen_k, "max_seqlen_k");
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.causal = causal;
  p.window_left = narrow(window_left, "window_size");
  p.window_right = narrow(window_right, "window_size");
  p.softcap = static_cast<float>(softcap);
  p.sinks = optional_data<float>(sinks, "sinks", {heads_q}, place);
  p.dump = to_dump(dump);
  p.guide_lse_hint = optional_data<float>(guide_lse_hint, "guide_lse_hint", {batch, 2, heads_kv}, place);
  p.dump_rows = optional_data<int32_t>(dump_rows, "dump_rows", {batch}, place);
  p.dump_len = optional_data<int32_t>(dump_len, "dump_len", {batch}, place);
  p.batch_invariant = batch_invariant;
  p.num_splits = narrow(num_splits, "num_splits");
  set_out(p, out, q, place);
  p.lse = mutable_floats(lse, "lse", {heads_q, total_q}, place);
  if (p.dump != VEGAS_DUMP_NONE) {
    if (!logits) refuse("`logits` must be given for a dump, got None");
    p.logits_dtype = logits_dtype(*logits, p.dump);
    switch (p.dump) {
      case VEGAS_DUMP_KV_HEAD:
        check_shape(*logits, "logits", {batch, 2, heads_kv, kAny});
        break;
      case VEGAS_DUMP_ROWS:
        check_shape(*logits, "logits", {batch, heads_q, 2, kAny});
        break;
      case VEGAS_DUMP_ALL:
        check_shape(*logits, "logits", {total_q, heads_q, kAny});
        break;
      default:
        check_shape(*logits, "logits", {batch, kAny});
    }
    place.check(*logits, "logits");
    check_last_dim_contiguous(*logits, "logits");
    int64_t last = logits->dim() - 1;
    if (logits->size(last) < max_seqlen_k) {
      refuse("`logits` must have at least max_seqlen_k = ", max_seqlen_k, " columns, got ", logits->size(last));
    }
    p.logits = logits->mutable_data_ptr();
    for (int64_t i = 0; i < last; ++i) p.logits_stride[i] = logits->stride(i);
  }
  if (guide_lse) p.guide_lse = mutable_floats(*guide_lse, "guide_lse", {batch, 2, heads_kv}, place);
  set_workspace(p.workspace, p.workspace_bytes, workspace, place);
  call(vegas_flash_attn_with_logit_dump, p, place);
}

// What topk_aggregate_logits and aggregate_logits share.
VegasSelectParams select_params(const Tensor& logits, int64_t dump, const Tensor& seqlens, int64_t mode,
                                const OptionalTensor& lse, const OptionalTensor& guide_lse,
                                const OptionalTensor& cu_seqlens_q, const OptionalTensor& dump_rows,
                                const OptionalTensor& sinks, const Place& place) {
  VegasSelectParams p{};
  p.dump = to_dump(dump);
  if (p.dump == VEGAS_DUMP_NONE) refuse("`dump` must name what `logits` holds, got none");
  if (mode != VEGAS_MODE_LOGIT && mode != VEGAS_MODE_WEIGHT) refuse("`mode` must be 0 or 1, got ", mode);
  p.mode = static_cast<VegasMode>(mode);
  if (seqlens.dim() != 1) refuse("`seqlens` must have shape (batch,), got ", shape_of(seqlens));
  int64_t batch = seqlens.size(0);
  bool summed = p.dump == VEGAS_DUMP_TOKEN || p.dump == VEGAS_DUMP_TOKEN_WEIGHT;
  int64_t dims = summed ? 2 : p.dump == VEGAS_DUMP_ALL ? 3 : 4;  // without layers
  int64_t lead = logits.dim() - dims;
  if (lead != 0 && lead != 1) {
    refuse("`logits` must have ", dims, " dimensions for this dump (", dims + 1, " with layers), got ", logits.dim());
  }
  int64_t last = logits.dim() - 1;
  p.layers = lead ? narrow(logits.size(0), "layers") : 1;
  p.batch = narrow(batch, "batch");
  p.num_heads = summed ? 1 : narrow(logits.size(lead + (p.dump == VEGAS_DUMP_KV_HEAD ? 2 : 1)), "num_heads");
  p.total_q = p.dump == VEGAS_DUMP_ALL ? narrow(logits.size(lead), "total_q") : 0;
  p.max_seqlen_k = narrow(logits.size(last), "max_seqlen_k");
  if (p.dump != VEGAS_DUMP_ALL && logits.size(lead) != batch) {
    refuse("`logits` must have batch = ", batch, " entries in dimension ", lead, ", got ", logits.size(lead));
  }
  bool planes = p.dump == VEGAS_DUMP_KV_HEAD || p.dump == VEGAS_DUMP_ROWS;
  if (planes && logits.size(lead + (p.dump == VEGAS_DUMP_KV_HEAD ? 1 : 2)) != 2) {
    refuse("`logits` must have two planes (first and last row), got shape ", shape_of(logits));
  }
  p.logits_dtype = logits_dtype(logits, p.dump);
  check_last_dim_contiguous(logits, "logits");
  p.logits = logits.const_data_ptr();
  p.logits_stride[0] = lead ? logits.stride(0) : 0;
  for (int64_t i = lead; i < last; ++i) p.logits_stride[i - lead + 1] = logits.stride(i);
  p.seqlens = data<int32_t>(seqlens, "seqlens", {batch}, place);
  p.cu_seqlens_q = optional_data<int32_t>(cu_seqlens_q, "cu_seqlens_q", {batch + 1}, place);
  p.dump_rows = optional_data<int32_t>(dump_rows, "dump_rows", {batch}, place);
  int64_t heads = p.num_heads;
  bool raw = p.dump == VEGAS_DUMP_ROWS || p.dump == VEGAS_DUMP_ALL;
  if (raw && p.mode == VEGAS_MODE_WEIGHT && !lse) refuse("`lse` must be given for weights, got None");
  if (lse) {
    int64_t total_q = lse->dim() ? lse->size(lse->dim() - 1) : 0;
    if (p.dump == VEGAS_DUMP_ALL && total_q != p.total_q) {
      refuse("`lse` must have total_q = ", p.total_q, " columns, got ", total_q);
    }
    p.total_q = narrow(total_q, "total_q");
    p.lse = lead ? optional_data<float>(lse, "lse", {p.layers, heads, total_q}, place)
                 : optional_data<float>(lse, "lse", {heads, total_q}, place);
  }
  p.guide_lse = lead ? optional_data<float>(guide_lse, "guide_lse", {p.layers, batch, 2, heads}, place)
                     : optional_data<float>(guide_lse, "guide_lse", {batch, 2, heads}, place);
  if (sinks && sinks->dim() == 2) {
    p.sinks = optional_data<float>(sinks, "sinks", {p.layers, heads}, place);
    p.sinks_stride_layer = heads;
  } else {
    p.sinks = optional_data<float>(sinks, "sinks", {heads}, place);
  }
  return p;
}

void topk_aggregate_logits(const Tensor& logits, int64_t dump, const Tensor& seqlens, int64_t k,
                           OptionalTensor k_per_request, int64_t mode, OptionalTensor lse, OptionalTensor guide_lse,
                           OptionalTensor cu_seqlens_q, OptionalTensor dump_rows, OptionalTensor sinks,
                           int64_t pool_before, int64_t pool_after, int64_t num_sink, int64_t num_recent,
                           bool count_forced, bool per_kv_head, OptionalTensor block_table, int64_t page_size,
                           int64_t max_k, Tensor indices, Tensor topk_length, OptionalTensor workspace) {
  Place place(logits);
  VegasSelectParams p =
      select_params(logits, dump, seqlens, mode, lse, guide_lse, cu_seqlens_q, dump_rows, sinks, place);
  int64_t batch = p.batch;
  p.k = narrow(k, "k");
  p.k_per_request = optional_data<int32_t>(k_per_request, "k", {batch}, place);
  p.pool_before = narrow(pool_before, "pool");
  p.pool_after = narrow(pool_after, "pool");
  p.num_sink = narrow(num_sink, "num_sink");
  p.num_recent = narrow(num_recent, "num_recent");
  p.count_forced = count_forced;
  p.per_kv_head = per_kv_head;
  set_block_table(p, block_table, batch, place);
  if (block_table) {
    p.page_size = narrow(page_size, "page_size");
    if (p.page_size <= 0) refuse("`page_size` must be positive, got ", page_size);
  }
  p.max_k = narrow(max_k, "max_k");
  int64_t lists = int64_t{p.layers} * batch * (per_kv_head ? p.num_heads : 1);
  check_dtype(indices, "indices", ScalarType::Int);
  check_dtype(topk_length, "topk_length", ScalarType::Int);
  place.check(indices, "indices");
  place.check(topk_length, "topk_length");
  check_contiguous(indices, "indices");
  check_contiguous(topk_length, "topk_length");
  if (indices.dim() == 0 || indices.numel() != lists * max_k || indices.size(indices.dim() - 1) != max_k) {
    refuse("`indices` must hold ", lists, " lists of max_k = ", max_k, ", got shape ", shape_of(indices));
  }
  if (topk_length.numel() != lists) {
    refuse("`topk_length` must hold ", lists, " lengths, got shape ", shape_of(topk_length));
  }
  p.indices = static_cast<int32_t*>(indices.mutable_data_ptr());
  p.topk_length = static_cast<int32_t*>(topk_length.mutable_data_ptr());
  set_workspace(p.workspace, p.workspace_bytes, workspace, place);
  call(vegas_topk_aggregate_logits, p, place);
}

void aggregate_logits(const Tensor& logits, int64_t dump, const Tensor& seqlens, int64_t mode, OptionalTensor lse,
                      OptionalTensor guide_lse, OptionalTensor cu_seqlens_q, OptionalTensor dump_rows,
                      OptionalTensor sinks, Tensor out) {
  Place place(logits);
  VegasSelectParams p =
      select_params(logits, dump, seqlens, mode, lse, guide_lse, cu_seqlens_q, dump_rows, sinks, place);
  check_dtype(out, "out", ScalarType::Float);
  place.check(out, "out");
  int64_t lead = out.dim() - 2;
  if (lead == 1) {
    check_shape(out, "out", {p.layers, p.batch, p.max_seqlen_k});
  } else {
    check_shape(out, "out", {p.batch, p.max_seqlen_k});
    if (p.layers != 1) refuse("`out` must lead with layers = ", p.layers, ", got shape ", shape_of(out));
  }
  check_last_dim_contiguous(out, "out");
  p.sums = static_cast<float*>(out.mutable_data_ptr());
  p.sums_stride_layer = lead ? out.stride(0) : 0;
  p.sums_stride_batch = out.stride(lead);
  call(vegas_aggregate_logits, p, place);
}

void sparse_paged_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& indices,
                         const Tensor& topk_length, OptionalTensor tail_start, OptionalTensor seqused_k,
                         OptionalTensor block_table, bool indices_are_slots, double softmax_scale, double softcap,
                         OptionalTensor sinks, int64_t window_left, int64_t window_right, OptionalTensor k_descale,
                         OptionalTensor v_descale, bool batch_invariant, int64_t num_splits, Tensor out, Tensor lse,
                         OptionalTensor workspace) {
  Place place(q);
  VegasSparseParams p{};
  p.q_dtype = query_dtype(q);
  int64_t batch = q.size(0), heads_q = q.size(1);
  p.cache = paged_cache(q, k_cache, v_cache, block_table, k_descale, v_descale, batch, place);
  int64_t heads_kv = p.cache.num_heads_kv;
  p.q = q.const_data_ptr();
  p.q_stride_row = q.stride(0);
  p.q_stride_head = q.stride(1);
  check_dtype(indices, "indices", ScalarType::Int);
  check_dtype(topk_length, "topk_length", ScalarType::Int);
  place.check(indices, "indices");
  place.check(topk_length, "topk_length");
  bool per_head = indices.dim() == 3;
  if (per_head) {
    check_shape(indices, "indices", {batch, heads_kv, kAny});
    check_shape(topk_length, "topk_length", {batch, heads_kv});
    p.indices_stride_head = indices.stride(1);
    p.topk_length_stride_head = topk_length.stride(1);
  } else {
    check_shape(indices, "indices", {batch, kAny});
    check_shape(topk_length, "topk_length", {batch});
  }
  check_last_dim_contiguous(indices, "indices");
  bool logical = !indices_are_slots && indices.numel() > 0;
  if (!block_table && (tail_start || logical)) {
    refuse("`block_table` must be given with `tail_start` or token indices, got None");
  }
  p.indices = static_cast<const int32_t*>(indices.const_data_ptr());
  p.indices_stride_batch = indices.stride(0);
  p.topk_length = static_cast<const int32_t*>(topk_length.const_data_ptr());
  p.topk_length_stride_batch = topk_length.stride(0);
  p.tail_start = optional_data<int32_t>(tail_start, "tail_start", {batch}, place);
  p.seqused_k = optional_data<int32_t>(seqused_k, "seqused_k", {batch}, place);
  p.batch = narrow(batch, "batch");
  p.num_heads_q = narrow(heads_q, "num_heads_q");
  p.max_k = narrow(indices.size(indices.dim() - 1), "max_k");
  p.indices_are_slots = indices_are_slots;
  p.softmax_scale = static_cast<float>(softmax_scale);
  p.softcap = static_cast<float>(softcap);
  p.sinks = optional_data<float>(sinks, "sinks", {heads_q}, place);
  p.window_left = narrow(window_left, "window_size");
  p.window_right = narrow(window_right, "window_size");
  p.batch_invariant = batch_invariant;
  p.num_splits = narrow(num_splits, "num_splits");
  set_out(p, out, q, place);
  p.lse = mutable_floats(lse, "lse", {heads_q, batch}, place);
  set_workspace(p.workspace, p.workspace_bytes, workspace, place);
  call(vegas_sparse_paged_decode, p, place);
}

int32_t bound(int64_t value, const char* name, int64_t least) {
  if (value < least) refuse("`", name, "` must be at least ", least, ", got ", value);
  return narrow(value, name);
}

Tensor new_workspace(const Tensor& like, int64_t op, int64_t max_batch, int64_t max_q_len, int64_t max_seqlen_k,
                     int64_t max_k, int64_t layers, int64_t num_heads_q, int64_t num_heads_kv, int64_t head_dim) {
  VegasBounds bounds{};
  bounds.max_batch = bound(max_batch, "max_batch", 0);
  bounds.max_q_len = bound(max_q_len, "max_q_len", 0);
  bounds.max_seqlen_k = bound(max_seqlen_k, "max_seqlen_k", 0);
  bounds.max_k = bound(max_k, "max_k", 0);
  bounds.layers = bound(layers, "layers", 0);
  bounds.num_heads_q = bound(num_heads_q, "num_heads_q", 1);
  bounds.num_heads_kv = bound(num_heads_kv, "num_heads_kv", 1);
  bounds.head_dim = bound(head_dim, "head_dim", 1);
  size_t bytes = vegas_workspace_bytes(static_cast<VegasOp>(op), &bounds, Place(like).device());
  return torch::stable::new_zeros(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

}  // namespace
}  // namespace vegas_ops::bindings

STABLE_TORCH_LIBRARY(vegas_ops, m) {
  m.def(
      "flash_attn_with_logit_dump(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seqused_k, "
      "Tensor cu_seqlens_q, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool causal, int window_left, "
      "int window_right, float softcap, Tensor? sinks, Tensor? k_descale, Tensor? v_descale, int dump, "
      "Tensor? guide_lse_hint, Tensor? dump_rows, Tensor? dump_len, bool batch_invariant, int num_splits, "
      "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? logits, Tensor(d!)? guide_lse, Tensor(e!)? workspace) -> ()");
  m.def(
      "topk_aggregate_logits(Tensor logits, int dump, Tensor seqlens, int k, Tensor? k_per_request, int score_mode, "
      "Tensor? lse, Tensor? guide_lse, Tensor? cu_seqlens_q, Tensor? dump_rows, Tensor? sinks, int pool_before, "
      "int pool_after, int num_sink, int num_recent, bool count_forced, bool per_kv_head, Tensor? block_table, "
      "int page_size, int max_k, Tensor(a!) indices, Tensor(b!) topk_length, Tensor(c!)? workspace) -> ()");
  m.def(
      "aggregate_logits(Tensor logits, int dump, Tensor seqlens, int score_mode, Tensor? lse, Tensor? guide_lse, "
      "Tensor? cu_seqlens_q, Tensor? dump_rows, Tensor? sinks, Tensor(a!) out) -> ()");
  m.def(
      "sparse_paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor indices, Tensor topk_length, "
      "Tensor? tail_start, Tensor? seqused_k, Tensor? block_table, bool indices_are_slots, float softmax_scale, "
      "float softcap, Tensor? sinks, int window_left, int window_right, Tensor? k_descale, Tensor? v_descale, "
      "bool batch_invariant, int num_splits, Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace) -> ()");
  m.def(
      "new_workspace(Tensor like, int op, int max_batch, int max_q_len, int max_seqlen_k, int max_k, int layers, "
      "int num_heads_q, int num_heads_kv, int head_dim) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vegas_ops, CPU, m) {
  m.impl("flash_attn_with_logit_dump", TORCH_BOX(&vegas_ops::bindings::flash_attn_with_logit_dump));
  m.impl("topk_aggregate_logits", TORCH_BOX(&vegas_ops::bindings::topk_aggregate_logits));
  m.impl("aggregate_logits", TORCH_BOX(&vegas_ops::bindings::aggregate_logits));
  m.impl("sparse_paged_decode", TORCH_BOX(&vegas_ops::bindings::sparse_paged_decode));
}

STABLE_TORCH_LIBRARY_IMPL(vegas_ops, CUDA, m) {
  m.impl("flash_attn_with_logit_dump", TORCH_BOX(&vegas_ops::bindings::flash_attn_with_logit_dump));
  m.impl("topk_aggregate_logits", TORCH_BOX(&vegas_ops::bindings::topk_aggregate_logits));
  m.impl("aggregate_logits", TORCH_BOX(&vegas_ops::bindings::aggregate_logits));
  m.impl("sparse_paged_decode", TORCH_BOX(&vegas_ops::bindings::sparse_paged_decode));
}

STABLE_TORCH_LIBRARY_IMPL(vegas_ops, CompositeExplicitAutograd, m) {
  m.impl("new_workspace", TORCH_BOX(&vegas_ops::bindings::new_workspace));
}
