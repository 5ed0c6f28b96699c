package gatewayapi

import "culvert.dev/registry"

// l4Rules are those of a TCP or UDP listener: the one of the oldest route, which
// has it all. The others are attached, and wait.
func (t *translator) l4Rules(l *listener) []*registry.Rule {
	if len(l.rules) == 0 {
		return nil
	}
	for _, a := range l.rules[1:] {
		l.addShadowed(a.route, "listener "+string(l.spec.Name), l.rules[0].route, before(l.rules[0].route, a.route))
	}
	return []*registry.Rule{t.rule(l, l.rules[0].route)}
}
