//! One plan, shared by threads that each have a workspace of their own.
use sageattn::{
    Args, AttnDesc, Backend, Context, ContextDesc, Dtype, Error, Plan, Preset, Workspace,
};
use std::thread;

const LEN: usize = 64;
const DIM: usize = 64;

fn attend(plan: &Plan, seed: usize) -> Result<Vec<f32>, Error> {
    let x: Vec<f32> = (0..LEN * DIM).map(|i| ((i * seed) as f32 * 0.37).sin()).collect();
    let mut out = vec![0f32; x.len()];
    let mut workspace = Workspace::new(plan.info())?;
    for _ in 0..4 {
        let args = Args::dense([1, LEN as i32, LEN as i32], &x, &x, &x, &mut out);
        plan.execute(args, &mut workspace)?;
    }
    Ok(out)
}

fn main() -> Result<(), Error> {
    // The program has threads enough: each execute runs on the one that calls it.
    let desc = ContextDesc { backend: Backend::CPU, num_threads: 1, ..Default::default() };
    let context = Context::new(&desc)?;
    let desc = AttnDesc::new(Preset::SAGE2_8B)?
        .q_dtype(Dtype::F32)
        .head_dim(DIM as i32)
        .num_qo_heads(1)
        .max_qo_len(LEN as i32)
        .max_kv_len(LEN as i32);
    let plan = &context.plan(&desc)?;
    let outs = thread::scope(|scope| {
        let threads = [1, 2, 3, 4].map(|seed| scope.spawn(move || attend(plan, seed)));
        threads.map(|thread| thread.join().unwrap())
    });
    for (seed, out) in (1..).zip(outs) {
        assert_eq!(out?, attend(plan, seed)?, "seed {seed}");
    }
    println!("4 threads, 1 plan: the same bits as one after the other");
    Ok(())
}
