"""Package metadata of megatron-resihp: what to install and which commands it brings.

Tool settings (ruff, mypy, pytest, import-linter) are in pyproject.toml. Imports setuptools only.
"""

from setuptools import find_packages, setup

TEST_REQUIREMENTS = [
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "mypy>=1.11",
    "pyarrow",  # recorded jobs of others come as parquet
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.6",
]

setup(
    name="megatron-resihp",
    version="0.1.0",
    description="Keeps a Megatron-LM training job running when GPUs die, slow down or come back",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_resihp", "megatron_resihp.*"]),
    package_data={"megatron_resihp": ["py.typed", "cost/profiles/*.json", "simulator/data/*.json"]},
    install_requires=[
        # Patched seams are checked against these versions only: see megatron_resihp/integration.
        "megatron-core>=0.19,<0.20",
        "matplotlib",
        "numba",
        "numpy",
        "psutil",  # Megatron saves its torch_dist checkpoints with it, and does not ask for it
        "rich",
        "scipy",
        "torch",
    ],
    extras_require={
        # NVIDIA's Apex is not on the package index: the project of that name there is another one.
        # nvidia-ml-py tells which of a machine's GPUs a worker has.
        "gpu": ["nvidia-ml-py", "transformer-engine[pytorch]"],
        "test": TEST_REQUIREMENTS,
    },
    entry_points={"console_scripts": ["resihp = megatron_resihp.cli:main"]},
)
