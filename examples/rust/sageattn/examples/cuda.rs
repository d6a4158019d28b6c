//! Attention on a GPU, on a stream, against the CPU backend. Exits with 77 where there is no GPU.
//! The CUDA driver is loaded at run time, so that the program builds and starts without one.
use sageattn::{
    compare, sys, Args, AttnDesc, Backend, Bf16, Context, ContextDesc, Dtype, Mask, Preset, Shape,
    Status, Workspace,
};
use std::os::raw::{c_char, c_int, c_void};
use std::ptr::null_mut;

#[link(name = "dl")]
extern "C" {
    fn dlopen(file: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls a function of the driver: cuda!(library, "name"(value => type, ...)).
macro_rules! cuda {
    ($library:expr, $name:literal($($value:expr => $type:ty),*)) => {{
        let function = dlsym($library, concat!($name, "\0").as_ptr().cast());
        assert!(!function.is_null(), "the driver has no {}", $name);
        let function: unsafe extern "C" fn($($type),*) -> c_int = std::mem::transmute(function);
        let result = function($($value),*);
        assert!(result == 0, "{}: CUDA error {result}", $name);
    }};
}

const TOKENS: usize = 1024;
const HEADS: usize = 8;
const DIM: usize = 128;
const LENGTHS: [i32; 3] = [1, TOKENS as i32, TOKENS as i32]; // batch, qo_len, kv_len

fn main() -> Result<(), sageattn::Error> {
    let backend = |backend| ContextDesc { backend, ..Default::default() };
    let context = match Context::new(&backend(Backend::CUDA)) {
        Err(error) if [Status::E_NO_DEVICE, Status::E_DRIVER_TOO_OLD].contains(&error.status()) => {
            println!("skipped: {error}");
            std::process::exit(77);
        }
        other => other?,
    };
    let desc = AttnDesc::new(Preset::SAGE2_8B)?
        .q_dtype(Dtype::BF16)
        .mask(Mask::CAUSAL_BOTTOM_RIGHT)
        .head_dim(DIM as i32)
        .num_qo_heads(HEADS as i32)
        .max_qo_len(TOKENS as i32)
        .max_kv_len(TOKENS as i32);
    let plan = context.plan(&desc)?;
    let workspace_size = plan.info().preferred_workspace as usize;

    let waves = |step: f32| -> Vec<Bf16> {
        (0..TOKENS * HEADS * DIM).map(|i| Bf16::from_f32((i as f32 * step).sin())).collect()
    };
    let inputs = [waves(0.37), waves(0.73), waves(1.19)];
    let mut out = vec![Bf16::default(); inputs[0].len()];
    let bytes = out.len() * std::mem::size_of::<Bf16>();

    // SAFETY: the functions are the driver's, by their types in cuda.h; the memory on the device is
    // as large as the plan and the lengths want it, and waited for before it is read.
    unsafe {
        let cuda = dlopen("libcuda.so.1\0".as_ptr().cast(), 2);
        let (mut cuda_context, mut stream) = (null_mut::<c_void>(), null_mut::<sys::CUstream_st>());
        cuda!(cuda, "cuDevicePrimaryCtxRetain"(&mut cuda_context => *mut *mut c_void, 0 => c_int));
        cuda!(cuda, "cuCtxSetCurrent"(cuda_context => *mut c_void));
        cuda!(cuda, "cuStreamCreate"(&mut stream => *mut *mut sys::CUstream_st, 1 => u32));
        let mut memory = [null_mut::<c_void>(); 5]; // q, k, v, out, workspace
        for (address, size) in memory.iter_mut().zip([bytes, bytes, bytes, bytes, workspace_size]) {
            cuda!(cuda, "cuMemAlloc_v2"(address => *mut *mut c_void, size => usize));
        }
        for (&address, input) in memory.iter().zip(&inputs) {
            let from = input.as_ptr();
            cuda!(cuda, "cuMemcpyHtoD_v2"(address => *mut c_void, from => *const Bf16, bytes => usize));
        }

        let [q, k, v, device_out, workspace] = memory;
        let input = |data: *mut c_void| sys::sageattn_const_tensor { data, ..Default::default() };
        let args = sys::sageattn_execute_args {
            batch: LENGTHS[0],
            qo_len: LENGTHS[1],
            kv_len: LENGTHS[2],
            q: input(q),
            k: input(k),
            v: input(v),
            out: sys::sageattn_tensor { data: device_out, ..Default::default() },
            ..Default::default()
        };
        plan.execute_raw(&args, workspace, workspace_size, stream)?;
        cuda!(cuda, "cuStreamSynchronize"(stream => *mut sys::CUstream_st));
        let to = out.as_mut_ptr();
        cuda!(cuda, "cuMemcpyDtoH_v2"(to => *mut Bf16, device_out => *mut c_void, bytes => usize));
        for address in memory {
            cuda!(cuda, "cuMemFree_v2"(address => *mut c_void));
        }
        cuda!(cuda, "cuStreamDestroy_v2"(stream => *mut sys::CUstream_st));
        cuda!(cuda, "cuDevicePrimaryCtxRelease_v2"(0 => c_int));
    }

    let arch = plan.info().arch; // the CPU backend emulates it
    let cpu = Context::new(&ContextDesc { target_arch: arch, ..backend(Backend::CPU) })?;
    let plan_cpu = cpu.plan(&desc)?;
    let mut workspace = Workspace::new(plan_cpu.info())?;
    let mut expected = vec![Bf16::default(); out.len()];
    let [q, k, v] = &inputs;
    plan_cpu.execute(Args::dense(LENGTHS, q, k, v, &mut expected), &mut workspace)?;
    let shape = Shape {
        batch: LENGTHS[0],
        len: LENGTHS[1],
        num_heads: HEADS as i32,
        head_dim: DIM as i32,
        ..Default::default()
    };
    let result = compare(shape, &out, &expected)?;
    let kernel = &plan.info().kernel_name;
    println!("{kernel} on sm_{arch}: relative error {:.1e} to the CPU backend", result.rel_error);
    assert!(result.nonfinite_out == 0 && result.rel_error < 1e-2, "{result:?}");
    Ok(())
}
