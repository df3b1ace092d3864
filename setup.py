"""Package metadata. Ranges say what should work; constraints.txt pins what is tested."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="specforge_trim",
    version="0.1.0",
    description="EAGLE-3 draft training that computes only the rows that reach a loss",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["specforge_trim", "specforge_trim.*"]),
    install_requires=[
        "torch>=2.11",
        "transformers>=5.0",
        "safetensors>=0.5",
        "numpy>=1.26",
        "pyyaml>=6.0",
        "tqdm>=4.66",
        "filelock>=3.12",
        "jinja2>=3.1",
    ],
    extras_require={
        "parquet": ["pyarrow>=15"],
        "flash": ["flash-attn>=2.7"],
        "track": ["tensorboard>=2.17", "wandb>=0.18"],
        "dev": [
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.8",
            "mypy>=1.11",
            "pyarrow>=15",
            "matplotlib>=3.8",
            "tensorboard>=2.17",
            "types-PyYAML",
            "types-tqdm",
        ],
        "quickstart": ["gguf>=0.10", "accelerate>=1.0"],
        "plot": ["matplotlib>=3.8"],
        "bench": ["matplotlib>=3.8"],
    },
    entry_points={"console_scripts": ["specforge-trim = specforge_trim.cli.main:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
