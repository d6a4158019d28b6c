//! One declaration each, from which the Rust item and its entry in [`crate::layout`] are made.

macro_rules! opaque {
    ($($name:ident),+) => {$(
        #[repr(C)]
        pub struct $name {
            _data: [u8; 0],
            // Neither moved nor sent by Rust, which only holds pointers to it.
            _marker: std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>,
        }
    )+};
}

macro_rules! constants {
    ($($name:ident = $value:expr;)+) => {
        $(pub const $name: i32 = $value;)+

        /// Every constant of the header.
        pub const CONSTANTS: &[(&str, i32)] = &[$((stringify!($name), $name)),+];
    };
}

macro_rules! structs {
    ($($name:ident { $($field:ident: $type:ty,)+ })+) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)+ }

            structs!(@default $name $($field)+);
        )+

        /// Every struct of the header, as the compiler laid it out.
        pub fn structs() -> Vec<crate::layout::Struct> {
            vec![$({
                let value = <$name>::default();
                crate::layout::Struct {
                    name: stringify!($name),
                    size: std::mem::size_of::<$name>(),
                    fields: vec![$(crate::layout::field(
                        stringify!($field),
                        &value,
                        std::ptr::addr_of!(value.$field),
                    )),+],
                }
            }),+]
        }
    };
    (@default $name:ident struct_size $($field:ident)+) => {
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: zeros are numbers, null pointers and absent hooks.
                let zero: Self = unsafe { std::mem::zeroed() };
                Self { struct_size: std::mem::size_of::<Self>() as u32, ..zero }
            }
        }
    };
    (@default $name:ident $($field:ident)+) => {
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: as above.
                unsafe { std::mem::zeroed() }
            }
        }
    };
}

#[cfg(not(feature = "dlopen"))]
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)+) => {
        extern "C" {
            $(pub fn $name($($arg: $type),*) $(-> $result)?;)+
        }
    };
}

#[cfg(feature = "dlopen")]
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)+) => {
        pub(crate) struct Table {
            $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)+
        }

        /// The functions, found once in a process.
        pub(crate) fn table() -> Result<&'static Table, String> {
            static TABLE: crate::dynamic::Once<Table> = crate::dynamic::Once::new();
            TABLE.get(|library| Ok(Table {
                // SAFETY: the library declares a function of this name with this type.
                $($name: unsafe {
                    std::mem::transmute::<
                        std::ptr::NonNull<c_void>,
                        unsafe extern "C" fn($($type),*) $(-> $result)?,
                    >(library.function(concat!(stringify!($name), "\0"))?)
                },)+
            }))
        }

        $(
            /// # Safety
            /// As `sageattn.h` says.
            pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
                (table().unwrap_or_else(|why| panic!("{why}")).$name)($($arg),*)
            }
        )+
    };
}
