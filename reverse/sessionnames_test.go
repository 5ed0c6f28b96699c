package reverse

import (
	"reflect"
	"testing"

	"culvert.dev/tunnel"
)

// A change of any field of a registration is one that the gateway takes up.
func TestEveryFieldOfARegistrationCounts(t *testing.T) {
	values := map[reflect.Type]any{
		reflect.TypeFor[tunnel.Pattern](): tunnel.Pattern{Suffix: tunnel.MustParseName("cam.edge.example")},
		reflect.TypeFor[string]():         "cam",
		reflect.TypeFor[uint16]():         uint16(443),
		reflect.TypeFor[bool]():           true,
		reflect.TypeFor[[]string]():       []string{"alice"},
	}
	for field := range reflect.TypeFor[Registration]().Fields() {
		if !field.IsExported() {
			continue
		}
		var old, changed Registration
		reflect.ValueOf(&changed).Elem().FieldByIndex(field.Index).Set(reflect.ValueOf(values[field.Type]))
		if old.equal(&changed) || changed.equal(&old) {
			t.Errorf("a registration with another %s counts as the same", field.Name)
		}
		if !changed.equal(&changed) {
			t.Errorf("a registration with %s is not equal to itself", field.Name)
		}
	}
}
