//! Tells the linker where libsageattn is: in `SAGEATTN_LIB_DIR`, else where pkg-config says, else
//! where the linker looks by itself (which includes `LIBRARY_PATH`).

use std::{env, path::Path, process::Command};

fn main() {
    for name in ["SAGEATTN_LIB_DIR", "PKG_CONFIG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    if env::var_os("CARGO_FEATURE_DLOPEN").is_some() {
        println!("cargo:rustc-link-lib=dylib=dl"); // part of libc since glibc 2.34
        return;
    }
    if let Some(folder) = env::var("SAGEATTN_LIB_DIR").ok().or_else(pkg_config) {
        let library = Path::new(&folder).join("libsageattn.so");
        assert!(
            library.exists(),
            "{} does not exist: SAGEATTN_LIB_DIR, or else pkg-config, says that it does",
            library.display()
        );
        println!("cargo:rustc-link-search=native={folder}");
    }
    println!("cargo:rustc-link-lib=dylib=sageattn");
}

fn pkg_config() -> Option<String> {
    let output =
        Command::new("pkg-config").args(["--variable=libdir", "sageattn"]).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !folder.trim().is_empty()).then(|| folder.trim().to_string())
}
