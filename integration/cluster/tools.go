//go:build tools

package cluster

// The server in the pods of the conformance suite is built from here.
import _ "sigs.k8s.io/gateway-api/conformance/echo-basic"
