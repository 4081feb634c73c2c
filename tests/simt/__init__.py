"""The kernel interpreter: CUDA kernels compiled as host C++, run without a GPU. See README.md."""
