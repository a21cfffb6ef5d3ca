"""`raywire lint k8s`: the mistakes people make with RayClusters and RayJobs for models.

`workload` reads what a manifest says, each file of rules says what is wrong with it and what to do,
`findings` is what comes of it. All of it pure: documents in, findings out.
"""
