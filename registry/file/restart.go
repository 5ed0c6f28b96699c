package file

import (
	"fmt"
	"reflect"
	"strings"
)

// A Change is a key whose value differs from the one in force.
type Change struct {
	Key string // by its path, as in servicePorts.state
	Was string // "" where the key was left out
	Is  string // "" where it is left out now
}

// maxChangeText is how many bytes of a value a Change has.
const maxChangeText = 200

// RestartNeeded returns the keys whose values differ in next and take effect only with a
// restart: those with the tag reload:"restart". None has a secret.
func (c *Config) RestartNeeded(next *Config) []Change {
	var all []Change
	findChanges(&all, "", reflect.ValueOf(c.fixed()), reflect.ValueOf(next.fixed()), false)
	if next.captures() && !c.captures() { // its sockets have no mark by which they are left alone
		all = append(all, Change{Key: "agent.capture", Is: given(true)})
	}
	return all
}

// captures reports whether c has an agent that captures.
func (c *Config) captures() bool { return c.Agent != nil && c.Agent.Capture != nil }

// fixed returns what of c may need a restart.
func (c *Config) fixed() configuration {
	return configuration{ServicePorts: c.ServicePorts, VIPs: c.VIPs}
}

// findChanges adds the changes of an object with keys. Restart says that a change of any
// key needs one.
func findChanges(all *[]Change, path string, was, is reflect.Value, restart bool) {
	for i := range was.NumField() {
		field := was.Type().Field(i)
		key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if key == "" {
			continue
		}
		restart := restart || field.Tag.Get("reload") == "restart"
		key = strings.TrimPrefix(path+"."+key, ".")
		a, b := was.Field(i), is.Field(i)
		if a.Kind() == reflect.Pointer {
			switch {
			case a.IsNil() != b.IsNil() && restart:
				*all = append(*all, Change{key, given(!a.IsNil()), given(!b.IsNil())})
				continue
			case a.IsNil() || b.IsNil(): // what comes or goes needs none
				continue
			}
			a, b = a.Elem(), b.Elem()
		}
		switch {
		case !a.IsValid() || reflect.DeepEqual(a.Interface(), b.Interface()):
		case a.Kind() == reflect.Struct && hasKeys(a.Type()):
			findChanges(all, key, a, b, restart)
		case restart:
			*all = append(*all, Change{key, textOf(a), textOf(b)})
		}
	}
}

// givenOr stands for an object with keys.
func given(there bool) string {
	if there {
		return "{...}"
	}
	return ""
}

// hasKeys reports whether t is an object of the file, and not a value in other words.
func hasKeys(t reflect.Type) bool { return t.Kind() == reflect.Struct && len(planOf(t).keys) > 0 }

// textOf returns a value in about the words of the file; "" where there is none.
func textOf(v reflect.Value) string {
	text := plainText(v)
	if len(text) > maxChangeText {
		text = strings.ToValidUTF8(text[:maxChangeText], "") + "..."
	}
	return text
}

func plainText(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return ""
		}
		return plainText(v.Elem())
	case reflect.Slice:
		if v.Len() == 0 {
			return ""
		}
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = plainText(v.Index(i))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	}
	if v.IsZero() && v.Kind() != reflect.Bool {
		return ""
	}
	if s, ok := v.Interface().(fmt.Stringer); ok {
		return s.String()
	}
	if !hasKeys(v.Type()) {
		return fmt.Sprint(v.Interface())
	}
	var parts []string
	p := planOf(v.Type())
	for i, key := range p.keys {
		if text := plainText(v.FieldByIndex(p.fields[i].index)); text != "" {
			parts = append(parts, key+": "+text)
		}
	}
	return "{" + strings.Join(parts, ", ") + "}"
}
