// Package bench measures what a gateway takes in Kubernetes: how long it is from
// the change of an object to the first connection that goes by it, what a start
// is with ten thousand Services and five thousand TLSRoutes, and what the API
// server is asked meanwhile.
//
// The API server, etcd and culvert are real and processes; Services, EndpointSlices
// and routes are objects that the test writes. Those of the load lead to addresses
// of nobody; a few lead to two servers in the test. `make bench-kube` runs it at
// full size, and writes docs/BENCHMARKS-KUBE.md; its test runs it small.
package bench
