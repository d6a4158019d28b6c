use std::ffi::CString;
use std::fmt;
use std::os::raw::{c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut, NonNull};
use std::sync::Arc;

use crate::error::{check, fill, invalid, load};
use crate::{sys, text, AttnDesc, Backend, Error, LogLevel, Plan, PlanInfo};

/// Called with a line of the log, from any thread, also from several at once. It must not call the
/// library.
pub type Log = Arc<dyn Fn(LogLevel, &str) + Send + Sync>;

/// How a context is made. The default is good; the backend that it takes is CUDA where that can
/// run, so a program with its data in host memory asks for [`Backend::CPU`].
#[derive(Clone, Default)]
pub struct ContextDesc {
    /// [`crate::context_flags`], or-ed.
    pub flags: u32,
    pub backend: Backend,
    /// CUDA device ordinal, from 0.
    pub device: i32,
    /// 0: the device's. Else the arch to compile for or to emulate.
    pub target_arch: i32,
    /// Of the CPU backend. 0: one for each processor.
    pub num_threads: i32,
    /// Where compiled kernels are kept.
    pub cache_dir: Option<PathBuf>,
    /// NVRTC to load, file or folder.
    pub nvrtc_path: Option<PathBuf>,
    pub log: Option<Log>,
}

/// What is shared by all plans of a process and device.
pub struct Context {
    handle: NonNull<sys::sageattn_context>,
    /// Also held by every plan, whose calls log, too.
    log: Option<Arc<Log>>,
}

// SAFETY: every function may be called from any thread at any time, also on the same handle, but
// for its own destroy, which Rust calls when nobody else has it. Log hooks are Send and Sync.
unsafe impl Send for Context {}
unsafe impl Sync for Context {}

impl Context {
    pub fn new(desc: &ContextDesc) -> Result<Context, Error> {
        load()?;
        let cache_dir = desc.cache_dir.as_deref().map(|p| c_path("cache_dir", p)).transpose()?;
        let nvrtc_path = desc.nvrtc_path.as_deref().map(|p| c_path("nvrtc_path", p)).transpose()?;
        let log = desc.log.clone().map(Arc::new); // at an address of its own, for the library
        let c_desc = sys::sageattn_context_desc {
            flags: desc.flags,
            backend: desc.backend.0,
            device: desc.device,
            target_arch: desc.target_arch,
            num_threads: desc.num_threads,
            cache_dir: cache_dir.as_ref().map_or(null(), |path| path.as_ptr()),
            nvrtc_path: nvrtc_path.as_ref().map_or(null(), |path| path.as_ptr()),
            log: log.is_some().then_some(call_log as _),
            log_user: log.as_ref().map_or(null_mut(), |log| Arc::as_ptr(log) as *mut c_void),
            ..Default::default()
        };
        let mut handle = null_mut();
        // SAFETY: the strings live as long as the call, and `log` as long as the context.
        check(|error| unsafe { sys::sageattn_context_create(&c_desc, &mut handle, error) })?;
        Ok(Context { handle: NonNull::new(handle).expect("a handle on success"), log })
    }

    /// A context of the CPU backend, with a thread for each processor.
    pub fn cpu() -> Result<Context, Error> {
        Context::new(&ContextDesc { backend: Backend::CPU, ..Default::default() })
    }

    /// Makes a plan, compiling or loading its kernels. It may outlive the context.
    pub fn plan(&self, desc: &AttnDesc) -> Result<Plan, Error> {
        let mut plan = null_mut();
        // SAFETY: the handle is valid, and desc is one of this crate's.
        check(|error| unsafe {
            sys::sageattn_plan_create(self.handle.as_ptr(), desc.c(), &mut plan, error)
        })?;
        let plan = NonNull::new(plan).expect("a handle on success");
        Plan::new(plan, desc.clone(), self.log.clone())
    }

    /// What [`Context::plan`] would make, without making it; or why it could not.
    pub fn query(&self, desc: &AttnDesc) -> Result<PlanInfo, Error> {
        let mut info = sys::sageattn_plan_info::default();
        // SAFETY: as above.
        check(|error| unsafe {
            sys::sageattn_plan_query(self.handle.as_ptr(), desc.c(), &mut info, error)
        })?;
        Ok(info.into())
    }

    /// What was found and chosen, and why: lines of "key: value".
    pub fn report(&self) -> Result<String, Error> {
        // SAFETY: `fill` gives a buffer and its size.
        let mut text = fill(|buffer, size, needed, error| unsafe {
            sys::sageattn_context_report(self.handle.as_ptr(), buffer.cast(), size, needed, error)
        })?;
        text.pop(); // its NUL
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Runs small attentions of every preset and compares them with an exact computation.
    pub fn selftest(&self) -> Result<(), Error> {
        // SAFETY: the handle is valid.
        check(|error| unsafe { sys::sageattn_selftest(self.handle.as_ptr(), error) })
    }

    /// Every kernel that was compiled or loaded for a plan of this context.
    pub fn export_blob(&self) -> Result<Vec<u8>, Error> {
        // SAFETY: `fill` gives a buffer and its size.
        fill(|buffer, size, needed, error| unsafe {
            let context = self.handle.as_ptr();
            sys::sageattn_context_export_blob(context, buffer.cast(), size, needed, error)
        })
    }

    /// Adds the kernels of a blob that was exported elsewhere.
    ///
    /// # Safety
    /// A blob is code that will run on the device with access to all memory of the process there:
    /// it must come from an export.
    pub unsafe fn import_blob(&self, blob: &[u8]) -> Result<(), Error> {
        check(|error| {
            let data = blob.as_ptr().cast();
            sys::sageattn_context_import_blob(self.handle.as_ptr(), data, blob.len(), error)
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle.
        unsafe { sys::sageattn_context_destroy(self.handle.as_ptr()) }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("Context").field(&self.handle).finish()
    }
}

fn c_path(field: &str, path: &Path) -> Result<CString, Error> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| invalid(format!("{field} = {path:?}: must not hold a NUL")))
}

unsafe extern "C" fn call_log(log: *mut c_void, level: i32, message: *const c_char) {
    let log = &*log.cast::<Log>();
    let message = text::from_ptr(message);
    // A panic must not unwind through C, and has been reported when it arrives here.
    let _ = catch_unwind(AssertUnwindSafe(|| log(LogLevel(level), &message)));
}
