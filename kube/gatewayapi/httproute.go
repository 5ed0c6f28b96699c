package gatewayapi

// noHTTP is what everything of HTTP says of itself.
const noHTTP = "culvert routes no HTTP yet: requests are refused"

// httpRoutes are there to attach and to have a status, and for nothing else.
func (t *translation) httpRoutes() []*route {
	var rs []*route
	for _, o := range sorted(t.w.HTTPRoutes) {
		r := &route{Object: o, kind: httpRoute, parents: o.Spec.ParentRefs, hostnames: o.Spec.Hostnames}
		for _, rule := range o.Spec.Rules {
			for _, b := range rule.BackendRefs {
				r.refs = append(r.refs, b.BackendRef)
			}
		}
		rs = append(rs, r)
	}
	return rs
}
