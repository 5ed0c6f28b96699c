package file

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// fieldsOf returns the keys of the objects that are decoded into a T, in the order of
// its fields. Keys that want more than their type says are read by those in special.
// The tag of a field is its key:
//
//	Kubeconfig string `yaml:"kubeconfig"`
//	IdleTimeout time.Duration `yaml:"idleTimeout,min=1ms"`
//	MaxPendingConnections int `yaml:"maxPendingConnections,limit"`
//
// The option min is the least value, 0 if left out; limit is for a count of at least 1, or
// -1 for no limit. A value of another type than string, bool, int and time.Duration
// is decodable, or a pointer to one.
func fieldsOf[T any](special []field[T]) []field[T] {
	var fields []field[T]
	t := reflect.TypeFor[T]()
	for i := range t.NumField() {
		key, options, _ := strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
		if key == "" {
			continue
		}
		if s := slices.IndexFunc(special, func(f field[T]) bool { return f.key == key }); s >= 0 {
			fields = append(fields, special[s])
			continue
		}
		fields = append(fields, field[T]{key, func(d *decoder, n *yaml.Node, to *T) {
			d.value(n, key, options, reflect.ValueOf(to).Elem().Field(i))
		}})
	}
	return fields
}

// value reads a value by its type.
func (d *decoder) value(n *yaml.Node, key, options string, to reflect.Value) {
	least, _ := strings.CutPrefix(options, "min=")
	if to.Kind() == reflect.Pointer {
		to.Set(reflect.New(to.Type().Elem()))
	} else {
		to = to.Addr()
	}
	switch to := to.Interface().(type) {
	case decodable:
		to.decode(d, n, key)
	case *string:
		*to, _ = d.text(n, key)
	case *bool:
		d.boolean(n, key, to)
	case *int:
		if options == "limit" {
			d.limit(n, key, to)
			return
		}
		min, _ := strconv.Atoi(least)
		if v, ok := d.integer(n, key, min, math.MaxInt32); ok {
			*to = v
		}
	case *time.Duration:
		min, _ := time.ParseDuration(least)
		d.duration(n, key, min, to)
	default:
		panic(fmt.Sprintf("file: %q is a %T, which can't be decoded", key, to))
	}
}

// limit reads a count of which -1 means no limit.
func (d *decoder) limit(n *yaml.Node, key string, to *int) {
	if v, ok := d.integer(n, key, -1, math.MaxInt32); ok && v != 0 {
		*to = v
	} else if ok {
		d.errorf(n, "write -1 for no limit", "%s is 0, which would refuse every client", key)
	}
}
