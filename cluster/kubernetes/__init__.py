"""`raywire render k8s` and `raywire lint k8s`: what a KubeRay operator is given, and whether
it is right.

    settings + model  --sizing-->  what each pod needs  --manifests-->  documents  --render-->  YAML
                                                        YAML of anybody  --lint-->  findings

Everything here is pure but `cli` and `files`; nobody talks to a cluster. What was proved by schemas
alone, and what by running it, is in docs/kubernetes.md.
"""
