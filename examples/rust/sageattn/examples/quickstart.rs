//! Causal attention of 4 heads over 256 tokens. Needs no GPU.
use sageattn::{Args, AttnDesc, Context, Dtype, Mask, Preset, Workspace};

const TOKENS: usize = 256;
const HEADS: usize = 4;
const DIM: usize = 64;

fn main() -> Result<(), sageattn::Error> {
    let x: Vec<f32> =
        (0..TOKENS * HEADS * DIM).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let (q, k, v) = (&x, &x, &x);
    let mut out = vec![0f32; x.len()]; // all [token][head][channel]

    let context = Context::cpu()?; // data in host memory
    let desc = AttnDesc::new(Preset::SAGE2_8B)? // what to compute, and the limits of every execute
        .q_dtype(Dtype::F32)
        .mask(Mask::CAUSAL_BOTTOM_RIGHT)
        .head_dim(DIM as i32)
        .num_qo_heads(HEADS as i32)
        .max_qo_len(TOKENS as i32)
        .max_kv_len(TOKENS as i32);
    let plan = context.plan(&desc)?;
    let mut workspace = Workspace::new(plan.info())?;

    let lengths = [1, TOKENS as i32, TOKENS as i32]; // batch, qo_len, kv_len
    plan.execute(Args::dense(lengths, q, k, v, &mut out), &mut workspace)?;
    let last = &out[(TOKENS - 1) * HEADS * DIM..];
    println!(
        "token 0: {:.3} {:.3} (its own v: {:.3} {:.3}), last token: {:.3} {:.3}",
        out[0], out[1], v[0], v[1], last[0], last[1]
    );
    Ok(())
}
