"""Which files make up a data set, where they live, and what they must contain."""

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One published file: its name, its size in bytes and its sha256 (hexadecimal)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class DataSource:
    """A public home and the files below it; `mean` and `std` are of the training pixels in [0, 1]."""

    home: str
    files: tuple[File, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


# The sizes and checksums are those of the makers' own files: the md5 sums they publish (MNIST f68b3c2d...,
# Fashion-MNIST 8d4fb7e6..., CIFAR-10 c32a1d4a...) belong to the same bytes; Omniglot's are those by which TensorFlow
# Datasets knows its archives. Order: training images, training labels, test images, test labels. The means and
# standard deviations, Omniglot's at 28×28, are the customary four digits; the tests compute them again from the pixels.
SOURCES: dict[str, DataSource] = {
    "mnist": DataSource(
        home="https://ossci-datasets.s3.amazonaws.com/mnist/",
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        mean=(0.1307,),
        std=(0.3081,),
    ),
    "fashion-mnist": DataSource(
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "cifar-10": DataSource(
        home="https://www.cs.toronto.edu/~kriz/",
        files=(
            File(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "omniglot": DataSource(
        home="https://raw.githubusercontent.com/brendenlake/omniglot/master/python/",
        files=(
            File(
                "images_background.zip",
                9_464_212,
                "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
            ),
            File(
                "images_evaluation.zip",
                6_462_886,
                "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
            ),
        ),
        mean=(0.0779,),
        std=(0.2303,),
    ),
}
