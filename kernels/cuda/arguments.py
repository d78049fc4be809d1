"""The arguments of a kernel, each in the parameter's exact type: a plain int would be passed as 8 bytes."""

from ctypes import c_float, c_int32, c_int64, c_void_p

# Short names, as calls have up to twenty of them.
ptr = c_void_p
i32 = c_int32
i64 = c_int64
f32 = c_float

Argument = ptr | i32 | i64 | f32
