//! Three sequences of different lengths, packed, against each of them alone.
use sageattn::{
    Args, AttnDesc, BatchMode, Context, Dtype, Mask, Preset, SequenceStatus, Workspace,
};

const QO_HEADS: usize = 4;
const KV_HEADS: usize = 2; // two query heads read each
const DIM: usize = 64;

fn main() -> Result<(), sageattn::Error> {
    let (cu_q, cu_kv) = ([0, 1, 33, 60], [0, 100, 132, 200]); // sequence b: cu[b] .. cu[b + 1]
    let (total_q, total_kv) = (cu_q[3] as usize, cu_kv[3] as usize);
    let waves = |len: usize, step: f32| -> Vec<f32> {
        (0..len * DIM).map(|i| (i as f32 * step).sin()).collect()
    };
    let q = waves(total_q * QO_HEADS, 0.37);
    let (k, v) = (waves(total_kv * KV_HEADS, 0.73), waves(total_kv * KV_HEADS, 1.19));
    let mut out = vec![0f32; q.len()];

    let desc = AttnDesc::new(Preset::SAGE2_8B)?
        .q_dtype(Dtype::F32)
        .mask(Mask::CAUSAL_BOTTOM_RIGHT)
        .head_dim(DIM as i32)
        .num_qo_heads(QO_HEADS as i32)
        .num_kv_heads(KV_HEADS as i32)
        .max_qo_len(64) // of one sequence
        .max_kv_len(128);
    let context = Context::cpu()?;
    let packed = context.plan(&desc.clone().batch_mode(BatchMode::VARLEN).max_batch(3))?;
    let mut workspace = Workspace::new(packed.info())?;
    let mut status = [-1; 3];
    let total = [total_q as i64, total_kv as i64];
    let args = Args::varlen([&cu_q, &cu_kv], total, &q, &k, &v, &mut out).status(&mut status);
    packed.execute(args, &mut workspace)?;
    assert_eq!(status.map(SequenceStatus), [SequenceStatus::OK; 3]);

    let alone = context.plan(&desc)?;
    let mut workspace = Workspace::new(alone.info())?;
    for b in 0..3 {
        let tokens_q = cu_q[b] as usize * QO_HEADS * DIM..cu_q[b + 1] as usize * QO_HEADS * DIM;
        let tokens_kv = cu_kv[b] as usize * KV_HEADS * DIM..cu_kv[b + 1] as usize * KV_HEADS * DIM;
        let (k, v) = (&k[tokens_kv.clone()], &v[tokens_kv]);
        let mut out_b = vec![0f32; tokens_q.len()];
        let lengths = [1, cu_q[b + 1] - cu_q[b], cu_kv[b + 1] - cu_kv[b]];
        let args = Args::dense(lengths, &q[tokens_q.clone()], k, v, &mut out_b);
        alone.execute(args, &mut workspace)?;
        assert_eq!(out_b, out[tokens_q], "sequence {b}");
    }
    println!("3 packed sequences: each has the same bits as alone");
    Ok(())
}
