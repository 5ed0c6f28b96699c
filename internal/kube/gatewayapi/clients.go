package gatewayapi

import (
	"fmt"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"culvert.dev/registry"
)

// The annotations of Gateways and routes that say which client addresses may connect.
// A client must be admitted by both. ListenerSets have those of their Gateway.
const (
	noteClientsAllow = "culvert.dev/clients-allow"
	noteClientsDeny  = "culvert.dev/clients-deny"
)

// clientsOf returns the filter that o's annotations are. An annotation that can't be
// read is an error, and o must admit nobody then.
func clientsOf(o metav1.Object) (f registry.ClientFilter, err error) {
	for _, note := range []struct {
		key string
		to  *[]netip.Prefix
	}{{noteClientsAllow, &f.Allow}, {noteClientsDeny, &f.Deny}} {
		value, ok := o.GetAnnotations()[note.key]
		if !ok {
			continue
		}
		if *note.to, err = registry.ParseClientRanges(value); err != nil {
			return registry.ClientFilter{}, fmt.Errorf("annotation %s: %w", note.key, err)
		}
	}
	return f, nil
}
