package policy

import "strings"

// A name of Targets.Listeners is that of a listener, or of a section of one; one that
// ends with "/*" has all sections below: "gateway/shop/edge/*". A section whose name
// ends with "@" and an address is the same without it.

// onListener reports whether pattern, of Targets.Listeners, has the listener.
func onListener(pattern, listener string) bool {
	if pattern == listener {
		return true
	}
	section := withoutAddress(listener)
	if pattern == section {
		return true
	}
	above, all := strings.CutSuffix(pattern, "*")
	return all && above != "" && above == folder(section)
}

// withoutAddress returns the name of a section as it is at every address.
func withoutAddress(listener string) string {
	if strings.HasPrefix(listener, "unix:") || strings.HasPrefix(listener, "fd:") { // a path, an abstract socket or a name
		return listener
	}
	section, _, _ := strings.Cut(listener, "@")
	return section
}

// folder returns name up to its last slash, and "" if it has none.
func folder(name string) string { return name[:strings.LastIndexByte(name, '/')+1] }

// flagsOn returns what o.scoped has for a listener, and whether there is any of it.
func (o *decider) flagsOn(listener string) (all flags, ok bool) {
	section := withoutAddress(listener)
	all = noFlags
	for i, key := range [...]string{listener, section, folder(section)} {
		if more, found := o.scoped[key]; found && (i != 1 || section != listener) {
			all, ok = all.with(more), true
		}
	}
	return all, ok
}

// scope returns the key in o.scoped of a name of Targets.Listeners.
func scope(pattern string) string {
	if above, all := strings.CutSuffix(pattern, "/*"); all {
		return above + "/"
	}
	return pattern
}
