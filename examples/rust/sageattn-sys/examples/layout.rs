//! Prints the binding's structs, fields and constants by their C names, to be compared with the
//! header.

use sageattn_sys::layout;

fn main() {
    for s in layout::structs() {
        println!("struct {} {}", s.name, s.size);
        for field in s.fields {
            println!("field {} {} {} {}", s.name, field.name, field.offset, field.size);
        }
    }
    for (name, value) in layout::CONSTANTS {
        println!("const {name} {value}");
    }
}
