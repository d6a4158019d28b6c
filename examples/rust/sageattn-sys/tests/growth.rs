//! Structs of older and newer callers, by the rules of the header.

use sageattn_sys::*;
use std::mem::size_of;
use std::ptr::{addr_of_mut, null};

fn message(error: &sageattn_error) -> String {
    error.message.iter().take_while(|&&c| c != 0).map(|&c| c as u8 as char).collect()
}

fn cpu() -> *mut sageattn_context {
    load().unwrap();
    let desc = sageattn_context_desc { backend: SAGEATTN_BACKEND_CPU, ..Default::default() };
    let mut context = std::ptr::null_mut();
    let mut error = sageattn_error::default();
    let status = unsafe { sageattn_context_create(&desc, &mut context, &mut error) };
    assert_eq!(status, SAGEATTN_OK, "{}", message(&error));
    context
}

fn desc() -> sageattn_attn_desc {
    sageattn_attn_desc {
        q_dtype: SAGEATTN_F32,
        head_dim: 64,
        num_qo_heads: 1,
        max_qo_len: 16,
        max_kv_len: 16,
        ..Default::default()
    }
}

#[test]
fn a_shorter_struct_reads_as_zero_in_what_it_lacks() {
    let context = cpu();
    let mut desc = desc();
    let mut info = sageattn_plan_info::default();
    let mut error = sageattn_error::default();
    desc.num_sinks = 1; // refused where it is read
    unsafe {
        let status = sageattn_plan_query(context, &desc, &mut info, &mut error);
        assert_eq!(status, SAGEATTN_E_UNSUPPORTED);
        assert!(message(&error).contains("num_sinks"), "{}", message(&error));

        let without = addr_of_mut!(desc.num_sinks) as usize - addr_of_mut!(desc) as usize;
        desc.struct_size = without as u32;
        let status = sageattn_plan_query(context, &desc, &mut info, &mut error);
        assert_eq!(status, SAGEATTN_OK, "{}", message(&error));

        // An output is written as far as it reaches, and not beyond.
        let mut info = sageattn_plan_info { struct_size: 8, arch: -7, ..Default::default() };
        let status = sageattn_plan_query(context, &desc, &mut info, &mut error);
        assert_eq!((status, info.backend, info.arch), (SAGEATTN_OK, SAGEATTN_BACKEND_CPU, -7));
        sageattn_context_destroy(context);
    }
}

#[test]
fn a_longer_struct_must_end_with_zeros() {
    #[repr(C)]
    struct Newer {
        known: sageattn_attn_desc,
        new: i64,
    }
    let context = cpu();
    let mut newer = Newer { known: desc(), new: 0 };
    newer.known.struct_size = size_of::<Newer>() as u32;
    let mut error = sageattn_error::default();
    unsafe {
        let info = std::ptr::null_mut();
        let known: *const sageattn_attn_desc = (&newer as *const Newer).cast();
        let status = sageattn_plan_query(context, known, info, &mut error);
        assert_eq!(status, SAGEATTN_OK, "{}", message(&error));

        newer.new = 1;
        let known: *const sageattn_attn_desc = (&newer as *const Newer).cast();
        let status = sageattn_plan_query(context, known, info, &mut error);
        assert_eq!(status, SAGEATTN_E_UNKNOWN_FIELD);
        let offset = size_of::<sageattn_attn_desc>().to_string();
        assert!(message(&error).contains(&offset), "{}", message(&error));

        assert_eq!(
            sageattn_plan_query(context, null(), info, &mut error),
            SAGEATTN_E_INVALID_ARGUMENT
        );
        sageattn_context_destroy(context);
    }
}
