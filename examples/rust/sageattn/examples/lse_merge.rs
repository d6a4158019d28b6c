//! Attention over two halves of the keys, merged by their log-sum-exp, against that over all keys.
use sageattn::{compare, Args, AttnDesc, Context, Dtype, Preset, Shape, Workspace};

const LEN: usize = 128;
const KV_LEN: usize = 256;
const HEADS: usize = 2;
const DIM: usize = 64;

fn waves(len: usize, step: f32) -> Vec<f32> {
    (0..len * HEADS * DIM).map(|i| (i as f32 * step).sin()).collect()
}

fn main() -> Result<(), sageattn::Error> {
    let (q, k, v) = (waves(LEN, 0.37), waves(KV_LEN, 0.73), waves(KV_LEN, 1.19));
    let desc = AttnDesc::new(Preset::EXACT)?
        .q_dtype(Dtype::F32)
        .head_dim(DIM as i32)
        .num_qo_heads(HEADS as i32)
        .max_qo_len(LEN as i32)
        .max_kv_len(KV_LEN as i32);
    let plan = Context::cpu()?.plan(&desc)?;
    let mut workspace = Workspace::new(plan.info())?;

    let mut attend = |k: &[f32], v: &[f32]| {
        let (mut out, mut lse) = (vec![0f32; q.len()], vec![0f32; HEADS * LEN]); // lse: [head][token]
        let kv_len = k.len() / (HEADS * DIM);
        let args = Args::dense([1, LEN as i32, kv_len as i32], &q, k, v, &mut out).lse(&mut lse);
        plan.execute(args, &mut workspace)?;
        Ok((out, lse))
    };
    let (whole, _) = attend(&k, &v)?;
    let half = k.len() / 2;
    let (mut merged, lse_a) = attend(&k[..half], &v[..half])?;
    let (other, lse_b) = attend(&k[half..], &v[half..])?;

    for token in 0..LEN {
        for head in 0..HEADS {
            let (a, b) = (lse_a[head * LEN + token], lse_b[head * LEN + token]);
            let max = a.max(b); // -inf would mean that neither half has a key that the query sees
            let (a, b) = ((a - max).exp(), (b - max).exp());
            let first = (token * HEADS + head) * DIM;
            for i in first..first + DIM {
                merged[i] = (a * merged[i] + b * other[i]) / (a + b);
            }
        }
    }
    let shape = Shape {
        batch: 1,
        len: LEN as i32,
        num_heads: HEADS as i32,
        head_dim: DIM as i32,
        ..Default::default()
    };
    let result = compare(shape, &merged, &whole)?;
    println!("two halves, merged: relative error {:.1e}", result.rel_error);
    assert!(result.rel_error < 1e-6, "{result:?}");
    Ok(())
}
