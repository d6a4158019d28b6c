use std::alloc::{alloc, dealloc, Layout as Memory};
use std::fmt;
use std::os::raw::c_void;
use std::ptr::{null, null_mut, NonNull};
use std::sync::Arc;

use crate::error::{check, fill, invalid};
use crate::tensor::Sizes;
use crate::text::mirror;
use crate::{
    sys, AttnDesc, Backend, Dtype, Error, Granularity, Input, Kernel, Log, Lse, Origin, Output,
    PvAccum, PvFormat, PvModel, QkFormat, Rotation, RowSum, Smooth, SmoothV, Status, VScale,
};

mirror! {
    /// What a plan is: `sageattn_plan_info`, with every AUTO resolved.
    PlanInfo of sageattn_plan_info {
        backend: Backend,
        arch: i32,
        origin: Origin,
        /// With fewer bytes an execute is refused.
        min_workspace: i64,
        /// With more bytes it is not faster.
        preferred_workspace: i64,
        workspace_alignment: i32,
        registers: i32,
        spill_bytes: i32,
        smem_bytes: i32,
        threads: i32,
        launches: i32,
        compile_ms: f32,
        b_q: i32,
        b_k: i32,
        promotion_interval: i32,
        q_dtype: Dtype,
        kv_dtype: Dtype,
        out_dtype: Dtype,
        head_dim_v: i32,
        num_kv_heads: i32,
        sm_scale: f32,
        qk_format: QkFormat,
        qk_granularity: Granularity,
        smooth_q: Smooth,
        smooth_k: Smooth,
        smooth_v: SmoothV,
        v_scale: VScale,
        rotation: Rotation,
        pv_format: PvFormat,
        row_sum: RowSum,
        pv_accum: PvAccum,
        kernel: Kernel,
        pv_model: PvModel,
        kernel_name: String,
        num_kernels: i32,
    }
}

mirror! {
    /// One compiled kernel of a plan: `sageattn_kernel_info`.
    KernelInfo of sageattn_kernel_info {
        arch: i32,
        origin: Origin,
        registers: i32,
        spill_bytes: i32,
        smem_bytes: i32,
        threads: i32,
        compile_ms: f32,
        name: String,
        macros: String,
    }
}

/// A kind of attention, ready to be executed. Immutable, and shared by any number of threads.
pub struct Plan {
    handle: NonNull<sys::sageattn_plan>,
    desc: AttnDesc,
    info: PlanInfo,
    /// The library calls it as long as there is a plan.
    _log: Option<Arc<Log>>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Plan {}
unsafe impl Sync for Plan {}

impl Plan {
    pub(crate) fn new(
        handle: NonNull<sys::sageattn_plan>,
        desc: AttnDesc,
        log: Option<Arc<Log>>,
    ) -> Result<Plan, Error> {
        let mut info = sys::sageattn_plan_info::default();
        let mut plan = Plan { handle, desc, info: info.into(), _log: log };
        // SAFETY: the handle is valid.
        check(|error| unsafe { sys::sageattn_plan_get_info(handle.as_ptr(), &mut info, error) })?;
        plan.info = info.into();
        Ok(plan)
    }

    pub fn info(&self) -> &PlanInfo {
        &self.info
    }

    /// A kernel of the plan, in the order of their launches; there are `num_kernels`.
    pub fn kernel(&self, index: i32) -> Result<KernelInfo, Error> {
        let mut info = sys::sageattn_kernel_info::default();
        // SAFETY: the handle is valid.
        check(|error| unsafe {
            sys::sageattn_plan_get_kernel(self.handle.as_ptr(), index, &mut info, error)
        })?;
        Ok(info.into())
    }

    /// The kernels of this plan, for [`crate::Context::import_blob`].
    pub fn export_blob(&self) -> Result<Vec<u8>, Error> {
        // SAFETY: `fill` gives a buffer and its size.
        fill(|buffer, size, needed, error| unsafe {
            let plan = self.handle.as_ptr();
            sys::sageattn_plan_export_blob(plan, buffer.cast(), size, needed, error)
        })
    }

    /// Computes attention on slices, with the CPU backend. Each slice is checked to hold what the
    /// lengths and strides say.
    pub fn execute(&self, args: Args, workspace: &mut Workspace) -> Result<(), Error> {
        if self.info.backend != Backend::CPU {
            return Err(Error::new(
                Status::E_UNSUPPORTED,
                "execute: slices are host memory, but the plan's backend is CUDA: use execute_raw \
                 with device pointers, or a context with Backend::CPU",
            ));
        }
        let args = args.check(self)?;
        let memory = workspace.memory.as_ptr().cast();
        // SAFETY: `check` has made sure that everything lies in its slice, which `Args` borrows, as
        // does `workspace`; the library checks all else.
        unsafe { self.execute_raw(&args, memory, workspace.len(), null_mut()) }
    }

    /// Computes attention on pointers: with CUDA, enqueues it on a stream (null: the default one)
    /// and does not wait. It can be captured in a CUDA graph.
    ///
    /// # Safety
    /// All pointers of `args`, and `workspace`, must be to memory of the backend (with CUDA: of the
    /// device) that holds what `sageattn.h` says, until the work has run. Meanwhile nothing else may
    /// write any of it, or read what is written. `stream` must be null or a stream of the device.
    pub unsafe fn execute_raw(
        &self,
        args: &sys::sageattn_execute_args,
        workspace: *mut c_void,
        workspace_size: usize,
        stream: *mut sys::CUstream_st,
    ) -> Result<(), Error> {
        check(|error| {
            let plan = self.handle.as_ptr();
            sys::sageattn_execute(plan, args, workspace, workspace_size, stream, error)
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle.
        unsafe { sys::sageattn_plan_destroy(self.handle.as_ptr()) }
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("Plan").field(&self.info).finish()
    }
}

/// Lengths and tensors of one execute.
pub struct Args<'a> {
    lengths: Lengths<'a>,
    q: Input<'a>,
    k: Input<'a>,
    v: Input<'a>,
    out: Output<'a>,
    lse: Option<Lse<'a>>,
    seqused_kv: Option<&'a [i32]>,
    status: Option<&'a mut [i32]>,
}

enum Lengths<'a> {
    Dense { batch: i32, qo_len: i32, kv_len: i32 },
    Varlen { total_qo: i64, total_kv: i64, cu_seqlens_q: &'a [i32], cu_seqlens_kv: &'a [i32] },
}

impl<'a> Args<'a> {
    /// Sequences of equal lengths.
    pub fn dense(
        [batch, qo_len, kv_len]: [i32; 3],
        q: impl Into<Input<'a>>,
        k: impl Into<Input<'a>>,
        v: impl Into<Input<'a>>,
        out: impl Into<Output<'a>>,
    ) -> Self {
        Args::new(Lengths::Dense { batch, qo_len, kv_len }, q, k, v, out)
    }

    /// Packed sequences, for a plan with `BatchMode::VARLEN`. `cu_seqlens` is that of the queries
    /// and that of the keys, with an entry more than there are sequences, `total` the tokens in the
    /// tensors: the last entry of each, or more.
    pub fn varlen(
        cu_seqlens: [&'a [i32]; 2],
        total: [i64; 2],
        q: impl Into<Input<'a>>,
        k: impl Into<Input<'a>>,
        v: impl Into<Input<'a>>,
        out: impl Into<Output<'a>>,
    ) -> Self {
        let [cu_seqlens_q, cu_seqlens_kv] = cu_seqlens;
        let [total_qo, total_kv] = total;
        Args::new(Lengths::Varlen { total_qo, total_kv, cu_seqlens_q, cu_seqlens_kv }, q, k, v, out)
    }

    fn new(
        lengths: Lengths<'a>,
        q: impl Into<Input<'a>>,
        k: impl Into<Input<'a>>,
        v: impl Into<Input<'a>>,
        out: impl Into<Output<'a>>,
    ) -> Self {
        let (q, k, v, out) = (q.into(), k.into(), v.into(), out.into());
        Args { lengths, q, k, v, out, lse: None, seqused_kv: None, status: None }
    }

    /// Also writes the log-sum-exp: `[batch, num_qo_heads, qo_len]`, varlen `[num_qo_heads,
    /// total_qo]`.
    #[must_use]
    pub fn lse(mut self, lse: impl Into<Lse<'a>>) -> Self {
        self.lse = Some(lse.into());
        self
    }

    /// Keys of each sequence that exist.
    #[must_use]
    pub fn seqused_kv(mut self, seqused_kv: &'a [i32]) -> Self {
        self.seqused_kv = Some(seqused_kv);
        self
    }

    /// Also writes of each sequence whether its lengths made sense ([`crate::SequenceStatus`]).
    #[must_use]
    pub fn status(mut self, status: &'a mut [i32]) -> Self {
        self.status = Some(status);
        self
    }

    /// The args of C, all within their slices.
    fn check(self, plan: &Plan) -> Result<sys::sageattn_execute_args, Error> {
        let mut args = sys::sageattn_execute_args::default();
        let (sequences, len_q, len_kv);
        match self.lengths {
            Lengths::Dense { batch, qo_len, kv_len } => {
                (args.batch, args.qo_len, args.kv_len) = (batch, qo_len, kv_len);
                (sequences, len_q, len_kv) = (batch.into(), qo_len.into(), kv_len.into());
            }
            Lengths::Varlen { total_qo, total_kv, cu_seqlens_q, cu_seqlens_kv } => {
                args.batch = i32::try_from(cu_seqlens_q.len() as i64 - 1).unwrap_or(i32::MAX);
                check_len("cu_seqlens_q", cu_seqlens_q.len(), i64::from(args.batch) + 1)?;
                check_len("cu_seqlens_kv", cu_seqlens_kv.len(), i64::from(args.batch) + 1)?;
                (args.total_qo, args.total_kv) = (total_qo, total_kv);
                args.cu_seqlens_q = cu_seqlens_q.as_ptr();
                args.cu_seqlens_kv = cu_seqlens_kv.as_ptr();
                (sequences, len_q, len_kv) = (1, total_qo, total_kv);
            }
        }
        if let Some(seqused_kv) = self.seqused_kv {
            check_len("seqused_kv", seqused_kv.len(), args.batch.into())?;
        }
        if let Some(status) = &self.status {
            check_len("status", status.len(), args.batch.into())?;
        }

        let (desc, info) = (plan.desc.c(), &plan.info);
        let qo_heads = desc.num_qo_heads.into();
        let kv_heads = info.num_kv_heads.into();
        let (dim, dim_v) = (desc.head_dim.into(), info.head_dim_v.into());
        let sizes = |len, heads, dim| Sizes { batch: sequences, len, heads, dim };
        args.q = self.q.check("q", info.q_dtype, &sizes(len_q, qo_heads, dim))?;
        args.k = self.k.check("k", info.kv_dtype, &sizes(len_kv, kv_heads, dim))?;
        args.v = self.v.check("v", info.kv_dtype, &sizes(len_kv, kv_heads, dim_v))?;
        args.out = self.out.check("out", info.out_dtype, &sizes(len_q, qo_heads, dim_v))?;
        if let Some(lse) = self.lse {
            args.lse = lse.check(&sizes(len_q, qo_heads, 1))?;
        }
        args.seqused_kv = self.seqused_kv.map_or(null(), <[i32]>::as_ptr);
        args.status = self.status.map_or(null_mut(), <[i32]>::as_mut_ptr);
        Ok(args)
    }
}

fn check_len(name: &str, len: usize, wanted: i64) -> Result<(), Error> {
    if len as i64 == wanted {
        return Ok(());
    }
    Err(invalid(format!("{name}: has {len} entries: must have {wanted}")))
}

/// Host memory for executes of the CPU backend, one at a time.
pub struct Workspace {
    memory: NonNull<u8>,
    layout: Memory,
}

// SAFETY: it owns its memory.
unsafe impl Send for Workspace {}
unsafe impl Sync for Workspace {}

impl Workspace {
    /// As large as a plan prefers it. It also serves plans that need less.
    pub fn new(info: &PlanInfo) -> Result<Workspace, Error> {
        let size = usize::try_from(info.preferred_workspace).unwrap_or(usize::MAX);
        Workspace::with_size(size, info.workspace_alignment as usize)
    }

    pub fn with_size(size: usize, alignment: usize) -> Result<Workspace, Error> {
        // Memory of no bytes is nothing that can be asked for.
        let layout = Memory::from_size_align(size.max(1), alignment)
            .map_err(|why| invalid(format!("workspace of {size} bytes by {alignment}: {why}")))?;
        // SAFETY: the size is not 0.
        let memory = unsafe { alloc(layout) };
        let memory = NonNull::new(memory).ok_or_else(|| {
            Error::new(Status::E_OUT_OF_MEMORY, format!("workspace of {size} bytes: no memory"))
        })?;
        Ok(Workspace { memory, layout })
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}
