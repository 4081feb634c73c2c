"""The kernel interpreter: CUDA kernels compiled as host C++ and run without a GPU. See README.md."""
