package endpoints

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
)

// A Node is one as far as Services of type NodePort are concerned.
type Node struct {
	Ready      bool         // and not to be left out by load balancers
	Outer, Own []netip.Addr // ExternalIPs and InternalIPs
}

// NodeOf returns the fields of n that culvert uses.
func NodeOf(n *corev1.Node) (out Node) {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Ready = c.Status == corev1.ConditionTrue
		}
	}
	if _, no := n.Labels[corev1.LabelNodeExcludeBalancers]; no {
		out.Ready = false
	}
	for _, a := range n.Status.Addresses {
		switch a.Type {
		case corev1.NodeExternalIP:
			out.Outer = append(out.Outer, Addrs([]string{a.Address})...)
		case corev1.NodeInternalIP:
			out.Own = append(out.Own, Addrs([]string{a.Address})...)
		}
	}
	return out
}

// Addrs are those of list that are addresses.
func Addrs(list []string) (out []netip.Addr) {
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}
