//! Results against a plain fp64 attention, and what the safe interface promises.

use sageattn::*;
use std::sync::{Arc, Mutex};

/// softmax(sm_scale Q K^T) V of one sequence, all [token][head][channel], and its LSE [head][token].
fn reference(
    (q, k, v): (&[f32], &[f32], &[f32]),
    [qo_heads, kv_heads, dim]: [usize; 3],
    causal: bool,
) -> (Vec<f64>, Vec<f64>) {
    let (qo_len, kv_len) = (q.len() / (qo_heads * dim), k.len() / (kv_heads * dim));
    let (mut out, mut lse) = (vec![0f64; q.len()], vec![0f64; qo_heads * qo_len]);
    for i in 0..qo_len {
        for h in 0..qo_heads {
            let (q_row, kv_head) = ((i * qo_heads + h) * dim, h / (qo_heads / kv_heads));
            let visible = if causal { i + 1 + kv_len - qo_len } else { kv_len };
            let kv_row = |j: usize| (j * kv_heads + kv_head) * dim;
            let weights: Vec<f64> = (0..visible)
                .map(|j| {
                    let product = |d| f64::from(q[q_row + d]) * f64::from(k[kv_row(j) + d]);
                    ((0..dim).map(product).sum::<f64>() / (dim as f64).sqrt()).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            lse[h * qo_len + i] = sum.ln();
            for (j, weight) in weights.iter().enumerate() {
                for d in 0..dim {
                    out[q_row + d] += weight / sum * f64::from(v[kv_row(j) + d]);
                }
            }
        }
    }
    (out, lse)
}

fn rel_error(out: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(out.len(), expected.len());
    let square = |x: f64| x * x;
    let error: f64 = out.iter().zip(expected).map(|(&o, e)| square(f64::from(o) - e)).sum();
    (error / expected.iter().map(|&e| square(e)).sum::<f64>()).sqrt()
}

/// Between -1 and 1.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let step = |state: &u32| Some(state.wrapping_mul(1664525).wrapping_add(1013904223));
    let states = std::iter::successors(Some(seed), step).skip(1);
    states.take(len).map(|state| (state >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn desc(preset: Preset) -> AttnDesc {
    AttnDesc::new(preset)
        .unwrap()
        .q_dtype(Dtype::F32)
        .head_dim(DIM as i32)
        .num_qo_heads(HEADS as i32)
        .num_kv_heads(KV_HEADS as i32)
        .max_qo_len(QO_LEN as i32)
        .max_kv_len(KV_LEN as i32)
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const QO_LEN: usize = 40;
const KV_LEN: usize = 70;
const LENGTHS: [i32; 3] = [1, QO_LEN as i32, KV_LEN as i32];

struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn inputs() -> Inputs {
    let kv = KV_LEN * KV_HEADS * DIM;
    Inputs { q: noise(QO_LEN * HEADS * DIM, 1), k: noise(kv, 2), v: noise(kv, 3) }
}

fn plan(desc: &AttnDesc) -> (Plan, Workspace) {
    let plan = Context::cpu().unwrap().plan(desc).unwrap(); // whose context is dropped here
    let workspace = Workspace::new(plan.info()).unwrap();
    (plan, workspace)
}

/// The error of an execute with the default problem, changed by the caller.
fn refusal(desc: &AttnDesc, lengths: [i32; 3], out_len: usize) -> Error {
    let (plan, mut workspace) = plan(desc);
    let Inputs { q, k, v } = inputs();
    let mut out = vec![0f32; out_len];
    plan.execute(Args::dense(lengths, &q, &k, &v, &mut out), &mut workspace).unwrap_err()
}

fn says(error: &Error, status: Status, words: &[&str]) {
    assert_eq!(error.status(), status, "{error}");
    for word in words {
        assert!(error.message().contains(word), "no '{word}' in: {error}");
    }
}

#[test]
fn results_are_those_of_plain_attention() {
    let Inputs { q, k, v } = inputs();
    for causal in [false, true] {
        let (expected, expected_lse) = reference((&q, &k, &v), [HEADS, KV_HEADS, DIM], causal);
        // Of out and lse: fp32's rounding, and a half more than 8-bit operands were measured to cost.
        for (preset, bounds) in [(Preset::EXACT, [6e-8, 6e-8]), (Preset::SAGE2_8B, [0.06, 0.0015])]
        {
            let mask = if causal { Mask::CAUSAL_BOTTOM_RIGHT } else { Mask::NONE };
            let (plan, mut workspace) = plan(&desc(preset).mask(mask));
            let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; HEADS * QO_LEN]);
            let args = Args::dense(LENGTHS, &q, &k, &v, &mut out).lse(&mut lse);
            plan.execute(args, &mut workspace).unwrap();
            let errors = [rel_error(&out, &expected), rel_error(&lse, &expected_lse)];
            assert!(
                errors[0] < bounds[0] && errors[1] < bounds[1],
                "{preset:?} {mask:?}: {errors:?}"
            );
        }
    }
}

#[test]
fn windows_reach_to_both_sides() {
    let Inputs { q, k, v } = inputs();
    let attend = |desc: AttnDesc| {
        let (plan, mut workspace) = plan(&desc);
        let mut out = vec![0f32; q.len()];
        plan.execute(Args::dense(LENGTHS, &q, &k, &v, &mut out), &mut workspace).unwrap();
        out
    };
    let desc = desc(Preset::EXACT);
    let causal = attend(desc.clone().mask(Mask::CAUSAL_BOTTOM_RIGHT));
    assert_eq!(attend(desc.clone().window(-1, 0)), causal);
    // Query 0 sees the key on the diagonal and all after it, the last one that key alone.
    let after = attend(desc.window(0, -1));
    let (dim, row, v_row) = (0..DIM, HEADS * DIM, KV_HEADS * DIM);
    assert_eq!(after[(QO_LEN - 1) * row..][dim.clone()], v[(KV_LEN - 1) * v_row..][dim]);
    assert_ne!(after[..DIM], causal[..DIM]);
}

#[test]
fn strides_describe_parts_of_slices() {
    let Inputs { q, k, v } = inputs();
    let (plan, mut workspace) = plan(&desc(Preset::EXACT));
    let mut expected = vec![0f32; q.len()];
    plan.execute(Args::dense(LENGTHS, &q, &k, &v, &mut expected), &mut workspace).unwrap();

    // k and v as columns of rows of 2 * KV_HEADS * DIM, and out with its tokens upside down.
    let (row, out_row) = (KV_HEADS * DIM, HEADS * DIM);
    let kv: Vec<f32> =
        k.chunks(row).zip(v.chunks(row)).flat_map(|(k, v)| [k, v].concat()).collect();
    let strides = Strides { batch: 0, token: 2 * row as i64, head: DIM as i64, dim: 1 };
    let (k, v) = (Input::strided(&kv, 0, strides), Input::strided(&kv, row, strides));
    let mut out = vec![0f32; q.len()];
    let last = (QO_LEN - 1) * out_row;
    let upside_down = Strides { token: -(out_row as i64), ..strides };
    let args = Args::dense(LENGTHS, &q, k, v, Output::strided(&mut out, last, upside_down));
    plan.execute(args, &mut workspace).unwrap();
    let turned: Vec<f32> = out.chunks(out_row).rev().flatten().copied().collect();
    assert_eq!(turned, expected);

    for (offset, strides) in [
        (last - 1, upside_down),                              // one before the slice
        (1, Strides { token: out_row as i64, ..strides }),    // one behind it
        (0, Strides { token: i64::MAX, ..strides }),          // far behind it
        (usize::MAX, Strides { token: i64::MIN, ..strides }), // far before it
    ] {
        let tensor = Output::strided(&mut out, offset, strides);
        let args = Args::dense(LENGTHS, &q, k, v, tensor);
        let error = plan.execute(args, &mut workspace).unwrap_err();
        says(&error, Status::E_INVALID_ARGUMENT, &["out", "slice"]);
    }
}

#[test]
fn sixteen_bit_elements() {
    let Inputs { q, k, v } = inputs();
    let narrow = |x: &[f32]| -> Vec<Bf16> { x.iter().map(|&x| Bf16::from_f32(x)).collect() };
    let wide = |x: &[Bf16]| -> Vec<f32> { x.iter().map(|x| x.to_f32()).collect() };
    let (q, k, v) = (narrow(&q), narrow(&k), narrow(&v));
    let (plan, mut workspace) =
        plan(&desc(Preset::EXACT).q_dtype(Dtype::BF16).out_dtype(Dtype::F32));
    let mut out = vec![0f32; q.len()];
    plan.execute(Args::dense(LENGTHS, &q, &k, &v, &mut out), &mut workspace).unwrap();
    let (expected, _) = reference((&wide(&q), &wide(&k), &wide(&v)), [HEADS, KV_HEADS, DIM], false);
    let error = rel_error(&out, &expected);
    assert!(error < 6e-8, "{error:e}");

    let mut wrong = vec![F16::default(); q.len()];
    let args = Args::dense(LENGTHS, &q, &k, &v, &mut wrong);
    let error = plan.execute(args, &mut workspace).unwrap_err();
    says(&error, Status::E_INVALID_ARGUMENT, &["out", "SAGEATTN_F16", "SAGEATTN_F32"]);

    for (value, bits) in [(1.0, 0x3f80), (f32::MAX, 0x7f80), (1.0 + 1.0 / 256.0, 0x3f80)] {
        assert_eq!(Bf16::from_f32(value), Bf16(bits), "{value}");
    }
    assert!(Bf16::from_f32(f32::from_bits(0x7fff_ffff)).to_f32().is_nan());
}

#[test]
fn errors_say_what_is_wrong() {
    let desc = desc(Preset::SAGE2_8B);
    let all = QO_LEN * HEADS * DIM;
    let small = desc.clone().max_kv_len(KV_LEN as i32 - 1);
    says(&refusal(&small, LENGTHS, all), Status::E_LIMIT, &["kv_len = 70", "69"]);
    let negative = refusal(&desc, [-1, LENGTHS[1], LENGTHS[2]], all);
    says(&negative, Status::E_INVALID_ARGUMENT, &["batch = -1"]);
    let short = refusal(&desc, LENGTHS, all - 1);
    says(&short, Status::E_INVALID_ARGUMENT, &["out", &format!("{}", all - 1), "slice"]);

    let context = Context::cpu().unwrap();
    let mixed = desc.clone().qk_format(QkFormat::NONE);
    says(&context.plan(&mixed).unwrap_err(), Status::E_UNSUPPORTED, &["qk_format"]);
    let unknown = desc.clone().mask(Mask(77));
    says(&context.query(&unknown).unwrap_err(), Status::E_INVALID_ARGUMENT, &["mask = 77"]);
    let plan = context.plan(&desc).unwrap();
    says(&plan.export_blob().unwrap_err(), Status::E_UNSUPPORTED, &["export_blob"]);
    says(&context.export_blob().unwrap_err(), Status::E_UNSUPPORTED, &["export_blob"]);
    // SAFETY: it is refused.
    let refused = unsafe { context.import_blob(b"no blob") }.unwrap_err();
    says(&refused, Status::E_UNSUPPORTED, &["import_blob"]);
    says(&plan.kernel(0).unwrap_err(), Status::E_INVALID_ARGUMENT, &["index = 0"]);
    let desc = ContextDesc { cache_dir: Some("a\0b".into()), ..Default::default() };
    says(&Context::new(&desc).unwrap_err(), Status::E_INVALID_ARGUMENT, &["cache_dir"]);

    let error: Box<dyn std::error::Error> = Box::new(short);
    assert!(error.to_string().starts_with("SAGEATTN_E_INVALID_ARGUMENT: out"), "{error}");
}

#[test]
fn workspaces_must_fit() {
    let (plan, _) = plan(&desc(Preset::SAGE2_8B));
    let Inputs { q, k, v } = inputs();
    let mut out = vec![0f32; q.len()];
    let mut small = Workspace::with_size(1, plan.info().workspace_alignment as usize).unwrap();
    let args = Args::dense(LENGTHS, &q, &k, &v, &mut out);
    says(
        &plan.execute(args, &mut small).unwrap_err(),
        Status::E_WORKSPACE,
        &["workspace_size = 1"],
    );
    assert_eq!(
        Workspace::with_size(1, 3).err().unwrap().status(),
        Status::E_INVALID_ARGUMENT,
        "an alignment that is no power of two"
    );
}

#[test]
fn varlen_arrays_must_have_an_entry_for_each_sequence() {
    let desc = desc(Preset::EXACT).batch_mode(BatchMode::VARLEN).max_batch(2);
    let (plan, mut workspace) = plan(&desc);
    let Inputs { q, k, v } = inputs();
    let (cu_q, cu_kv) = ([0, 10, QO_LEN as i32], [0, 30, KV_LEN as i32]);
    let total = [QO_LEN as i64, KV_LEN as i64];
    let mut out = vec![0f32; q.len()];
    let mut short = [0];
    for (field, cu_kv, used, status) in [
        ("cu_seqlens_kv", &cu_kv[..2], None, None),
        ("seqused_kv", &cu_kv[..], Some(&[5][..]), None),
        ("status", &cu_kv[..], None, Some(&mut short[..])),
    ] {
        let mut args = Args::varlen([&cu_q, cu_kv], total, &q, &k, &v, &mut out);
        if let Some(used) = used {
            args = args.seqused_kv(used);
        }
        if let Some(status) = status {
            args = args.status(status);
        }
        let error = plan.execute(args, &mut workspace).unwrap_err();
        says(&error, Status::E_INVALID_ARGUMENT, &[field, "entries"]);
    }
    let args = Args::varlen([&[], &[]], total, &q, &k, &v, &mut out);
    let error = plan.execute(args, &mut workspace).unwrap_err();
    says(&error, Status::E_INVALID_ARGUMENT, &["batch = -1"]);

    // Nonsense among the lengths is no error of the call, and stays in its own rows.
    let (hostile, used, mut status) = ([0, 10, 1 << 20], [7, 40], [-1; 2]);
    let args = Args::varlen([&hostile, &cu_kv], total, &q, &k, &v, &mut out)
        .seqused_kv(&used)
        .status(&mut status);
    plan.execute(args, &mut workspace).unwrap();
    assert_eq!(
        status.map(SequenceStatus),
        [SequenceStatus::OK, SequenceStatus::BAD_LENGTHS],
        "status of each"
    );
    let (first, rest) = out.split_at(10 * HEADS * DIM);
    let keys = ..7 * KV_HEADS * DIM;
    let (expected, _) =
        reference((&q[..first.len()], &k[keys], &v[keys]), [HEADS, KV_HEADS, DIM], false);
    assert!(rel_error(first, &expected) < 6e-8);
    assert!(rest.iter().all(|x| x.is_nan()));
}

#[test]
fn plans_tell_what_they_are() {
    let context = Context::cpu().unwrap();
    let desc = desc(Preset::SAGE2_8B).sm_scale(0.5).window(3, 0);
    let info = context.query(&desc).unwrap();
    assert_eq!(&info, context.plan(&desc).unwrap().info());
    assert_eq!((info.backend, info.arch, info.sm_scale), (Backend::CPU, 90, 0.5));
    assert_eq!((info.qk_format, info.pv_format), (QkFormat::I8, PvFormat::E4M3));
    assert_eq!(info.kernel_name, "cpu_wgmma_i8_e4m3");
    assert_eq!(info.num_kv_heads, KV_HEADS as i32);
}

#[test]
fn contexts_report_and_log() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    let log: Log = Arc::new(move |level, line| {
        sink.lock().unwrap().push((level, line.to_string())); // unlocked before the panic
        panic!("which ends in the hook");
    });
    let kept = Arc::downgrade(&log);
    let desc =
        ContextDesc { backend: Backend::CPU, num_threads: 2, log: Some(log), ..Default::default() };
    let context = Context::new(&desc).unwrap();
    drop(desc);
    let report = context.report().unwrap();
    assert!(report.contains("backend: CPU"), "{report}");
    assert!(report.ends_with('\n') && !report.contains('\0'), "{report:?}");
    context.selftest().unwrap();
    let plan = context.plan(&self::desc(Preset::SAGE2_8B)).unwrap();
    drop(context);
    assert!(kept.upgrade().is_some(), "the plan may log");
    drop(plan);
    assert!(kept.upgrade().is_none());
    let lines = lines.lock().unwrap();
    assert!(lines.iter().any(|(level, _)| *level == LogLevel::INFO), "{lines:?}");
}

/// On a GPU. Elsewhere there is no such plan.
#[test]
fn plans_of_a_gpu_refuse_slices() {
    let context = match Context::new(&ContextDesc { backend: Backend::CUDA, ..Default::default() })
    {
        Err(error) => {
            assert!([Status::E_NO_DEVICE, Status::E_DRIVER_TOO_OLD].contains(&error.status()));
            return;
        }
        Ok(context) => context,
    };
    let plan = context.plan(&desc(Preset::SAGE1)).unwrap();
    let mut workspace = Workspace::new(plan.info()).unwrap();
    let Inputs { q, k, v } = inputs();
    let mut out = vec![0f32; q.len()];
    let args = Args::dense(LENGTHS, &q, &k, &v, &mut out);
    let error = plan.execute(args, &mut workspace).unwrap_err();
    says(&error, Status::E_UNSUPPORTED, &["host memory", "execute_raw"]);
}

#[test]
fn comparisons_count() {
    let (a, b) = (vec![1f32, 2.0, 3.0, f32::NAN], vec![1f32, 2.0, 3.5, 4.0]);
    let shape = Shape { batch: 1, len: 2, num_heads: 1, head_dim: 2, ..Default::default() };
    let result = compare(shape, &a, &b).unwrap();
    assert_eq!((result.count, result.nonfinite_out, result.max_abs_error), (3, 1, 0.5));
    let shape = Shape { len: 3, ..shape };
    says(&compare(shape, &a, &b).unwrap_err(), Status::E_INVALID_ARGUMENT, &["out", "slice"]);
}

#[test]
fn versions_are_those_of_the_header() {
    let parts =
        [sys::SAGEATTN_VERSION_MAJOR, sys::SAGEATTN_VERSION_MINOR, sys::SAGEATTN_VERSION_PATCH];
    assert_eq!(version().unwrap(), parts.map(|part| part.to_string()).join("."));
    assert_eq!(source_id().unwrap().len(), 64);
    // SAFETY: it takes nothing.
    assert_eq!(unsafe { sys::sageattn_version() }, sys::SAGEATTN_VERSION_NUMBER as u32);
}

/// Compiles if it holds.
#[test]
fn handles_may_be_shared() {
    fn shared<T: Send + Sync>() {}
    shared::<Context>();
    shared::<ContextDesc>();
    shared::<Plan>();
    shared::<Workspace>();
    shared::<AttnDesc>();
    shared::<Error>();
}
