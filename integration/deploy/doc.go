// Package deploy tests what installs culvert against the programs that read it:
// the chart against Helm's own engine, the kustomize folders against kustomize,
// the unit against systemd, and the line of the Dockerfile against Go. It is a
// module of its own for what Helm brings with it.
package deploy
